"""A second simulator with the same rules, as simple as possible: sets, no counters, everything computed anew.

It is independent of `lowtide.planning.simulator` and slow. Tests compare the two. B1 to B12 are the rules of
`lowtide.planning.backward`.
"""

from __future__ import annotations

import itertools

from lowtide.records import Trace


class NaiveSimulator:
    """One step under one set of decisions. Call `forward`, then `backward`."""

    def __init__(
        self, trace: Trace, keep, released=(), written_before=None, link=None, codec_cost=None, prefetch_after=None
    ):
        self.trace, self.keep = trace, list(keep)
        for j, op in enumerate(trace.ops):  # an op that overwrites a kept value is kept
            olds = [trace.values[w.old] for w in op.writes if w.old is not None]
            if any(old.made_at is None or self.keep[old.made_at] for old in olds):
                self.keep[j] = True
        self.released = {j for j in released if not self.keep[j]}
        self.n = len(trace.ops)
        self.written_before, self.link, self.prefetch_after = written_before or {}, link, prefetch_after or {}
        self.codec_cost = codec_cost or {}  # by value that is compressed if it is offloaded
        self.produced = [v for v, value in enumerate(trace.values) if value.made_at is not None]
        self.extra_s = 0.0
        self.replays = 0

    def size(self, values) -> int:
        return sum(self.trace.values[v].nbytes for v in values)

    def inputs(self, op):
        return [v for v in self.trace.ops[op].inputs if self.trace.values[v].made_at is not None]

    def kept(self, v):
        return self.keep[self.trace.values[v].made_at]

    def natural(self, v, j) -> bool:
        """Whether others hold v during forward op j."""
        value = self.trace.values[v]
        readers = [j for j in range(self.n) if v in self.trace.ops[j].inputs]
        if not value.made_at <= j <= max([min(value.held_until, self.n), *readers]):
            return False
        return not any(
            other.storage == value.storage and other.made_at is not None and value.made_at < other.made_at <= j
            for other in self.trace.values
        )

    def recipes(self, roots) -> set[int]:
        """Recomputed ops that these values depend on, through recomputed ops only."""
        found, pending = set(), [self.trace.values[v].made_at for v in roots]
        while pending:
            op = pending.pop()
            if op in found or self.keep[op]:
                continue
            found.add(op)
            pending += [self.trace.values[u].made_at for u in self.inputs(op)]
        return found

    def held(self, roots, before) -> set[int]:
        """Kept values with a user, a handle or a recipe, among ops before `before`."""
        handles = {v for v in self.trace.saved if v in self.produced and self.trace.values[v].made_at < before}
        recipes = {op for op in self.recipes(handles | roots) if op < before}
        needed = handles | {u for op in recipes for u in self.inputs(op)}
        return {v for v in needed if self.kept(v)}

    def forward(self) -> list[int]:
        live = []
        for j in range(self.n):
            natural = {v for v in self.produced if self.natural(v, j)}
            # Op j counts as run: kept values that it overwrites have been copied.
            held = {
                v
                for v in self.held(natural, j + 1)
                if not self.is_offloaded(v) or j < self.written_before[self.trace.values[v].made_at]
            }
            compressed = [v for v in self.codec_cost if self.is_offloaded(v) and self.trace.values[v].made_at < j]
            compressing = [v for v in compressed if self.trace.values[v].made_at == j - 1]
            compressed_bytes = self.compressed_size(compressed) + sum(self.workspace(v) for v in compressing)
            prefetched = self.to_prefetch(-1) if j == self.n - 1 else []
            live.append(
                self.trace.ops[j].other_bytes + self.size(natural | held) + compressed_bytes + self.size(prefetched)
            )
        for v in self.codec_cost:
            if self.is_offloaded(v):
                self.extra_s += self.codec_cost[v].compression_s(self.trace.values[v].nbytes)
        return live

    def is_offloaded(self, v) -> bool:
        """Whether v is offloaded: backward needs it, and its op has no codec or v does."""
        op = self.trace.values[v].made_at
        has_codec = any(other in self.codec_cost for other in self.trace.ops[op].outputs)
        return op in self.written_before and (not has_codec or v in self.codec_cost) and v in self.held(set(), self.n)

    def to_prefetch(self, event) -> list[int]:
        """Values in the store whose prefetch starts after this event, in order."""
        stored = [v for v in self.produced if self.is_offloaded(v) and v not in self.codec_cost]
        due = [v for v in stored if self.prefetch_after.get(self.trace.values[v].made_at) == event]
        return sorted(due, key=lambda v: (-self.trace.values[v].made_at, v))

    def compressed_size(self, values) -> int:
        return sum(self.codec_cost[v].compressed_bytes(self.trace.values[v].nbytes) for v in values)

    def workspace(self, v) -> int:
        return self.codec_cost[v].workspace_bytes(self.trace.values[v].nbytes)

    def backward(self) -> list[int]:
        saved = [v for v in self.produced if v in self.trace.saved]
        unpacks = self.trace.unpacks
        self.handles = set(saved)
        self.open_recipes = self.recipes(saved)
        self.resident = {v for v in self.held(set(), self.n) if not self.is_offloaded(v)}
        self.original = set(self.resident)
        self.compressed = {v for v in self.codec_cost if self.is_offloaded(v)}
        self.unpacked: set[int] = set()
        self.now_s = 0.0  # since the start of backward
        self.reads: list[tuple[int, float, float]] = []  # value, earliest start, duration
        self.prefetched: set[int] = set()  # prefetch started, not yet fetched
        self.fetched_ops: set[int] = set()
        self.start_prefetches(-1)
        peaks = []
        for k, unpack in enumerate(unpacks):
            self.k = k
            self.peak = self.live()
            if unpack.value in self.produced:
                self.unpacked.add(unpack.value)
                if unpack.value not in self.resident:
                    self.make_resident(unpack.value)
            during_replays = self.peak + unpack.other_bytes - unpack.rise_bytes
            peaks.append(max(during_replays, self.live() + unpack.other_bytes))  # B12
            if k + 1 == len(unpacks) or unpacks[k + 1].node != unpack.node:
                later = {other.value for other in unpacks[k + 1 :]}
                freed = {other.value for other in unpacks if other.node == unpack.node} - later  # B10
                self.handles -= freed
                self.unpacked -= freed
                self.resident -= {v for v in freed if self.trace.values[v].made_at in self.released}  # B6
                self.collect()
            self.now_s += unpack.time_s
        return peaks

    def start_prefetches(self, event) -> None:
        for v in self.to_prefetch(event):
            if v in self.resident or v in self.prefetched or not self.has_user(v):
                continue
            nbytes = self.trace.values[v].nbytes
            slowdown_s = self.link.prefetch_s_each + nbytes * self.link.prefetch_s_per_byte
            self.extra_s += slowdown_s
            self.now_s += slowdown_s
            self.reads.append((v, self.now_s, nbytes / (self.link.prefetch_bytes_per_s or self.link.in_bytes_per_s)))
            self.prefetched.add(v)

    def read_ends_at(self, v) -> float:
        """End of the read of v. Reads follow each other, each from its earliest start on."""
        end_s = 0.0
        for other, earliest_s, duration_s in self.reads:
            end_s = max(end_s, earliest_s) + duration_s
            if other == v:
                break
        return end_s

    def fetch(self, v) -> None:
        if v in self.prefetched:
            wait_s = max(0.0, self.read_ends_at(v) - self.now_s)
            self.prefetched.discard(v)
        else:
            wait_s = self.link.fetch_s + self.trace.values[v].nbytes / self.link.in_bytes_per_s
        self.extra_s += wait_s
        self.now_s += wait_s
        self.resident.add(v)
        op = self.trace.values[v].made_at
        if op not in self.fetched_ops:
            self.fetched_ops.add(op)
            self.start_prefetches(op)
        self.peak = max(self.peak, self.live())

    def live(self) -> int:
        def still_held(value):
            return value.held_until >= self.n + self.k

        others = {v for v in self.produced if self.natural(v, self.n) and still_held(self.trace.values[v])}
        shared = others & self.original
        # A replay makes a second copy of a value that others hold (B11).
        return (
            self.size(shared | (self.resident & self.original))
            + self.size(others - shared)
            + self.size(self.resident - self.original)
            + self.compressed_size(self.compressed)
            + self.size(self.prefetched)
        )

    def has_user(self, v) -> bool:
        return v in self.handles or any(v in self.inputs(op) for op in self.open_recipes)

    def collect(self) -> None:
        while True:
            dead = {op for op in self.open_recipes if not any(self.has_user(o) for o in self.trace.ops[op].outputs)}
            self.open_recipes -= dead
            if not dead:
                break
        self.resident = {v for v in self.resident if self.has_user(v)}
        self.compressed = {v for v in self.compressed if self.has_user(v)}
        self.prefetched = {v for v in self.prefetched if self.has_user(v)}

    def make_resident(self, value) -> None:  # B3
        stack = [value]
        waiting: list[tuple[int, int]] = []  # (value, op that waits for it)
        while stack:
            v = stack[-1]
            if v in self.resident:
                stack.pop()
                continue
            if self.is_offloaded(v):
                if v in self.codec_cost:
                    self.resident.add(v)
                    self.extra_s += self.codec_cost[v].decompression_s(self.trace.values[v].nbytes)
                    self.now_s += self.codec_cost[v].decompression_s(self.trace.values[v].nbytes)
                    self.peak = max(self.peak, self.live() + self.workspace(v))
                    self.compressed.discard(v)
                else:
                    self.fetch(v)
                stack.pop()
                continue
            op = self.trace.values[v].made_at
            missing = [u for u in self.inputs(op) if u not in self.resident]
            if missing:
                stack += missing
                waiting += [(u, op) for u in missing]
                continue
            self.replay(op, waiting)
            waiting = [(u, w) for u, w in waiting if w != op]
            released = {  # B6
                u
                for u in self.resident
                if self.trace.values[u].made_at in self.released
                and u not in self.unpacked
                and not any(u == x for x, _ in waiting)
            }
            self.resident -= released
            self.collect()
            stack.pop()

    def replay(self, op, waiting) -> None:
        record = self.trace.ops[op]
        assert op in self.open_recipes
        replay_s = (record.time_s if record.replay_s is None else record.replay_s) + self.trace.replay_overhead_s
        self.extra_s += replay_s
        self.now_s += replay_s
        self.replays += 1
        stored = {o for o in record.outputs if self.has_user(o) and o not in self.resident}  # B4
        scratch = []
        for write in record.writes:
            if write.old is None or write.old not in self.produced:
                continue
            others = [w for w in self.open_recipes if w != op and write.old in self.inputs(w)]
            no_other_user = op not in self.released and not others and write.old not in self.handles
            freed_after = (
                self.trace.values[write.old].made_at in self.released
                and write.old not in self.unpacked
                and [w for u, w in waiting if u == write.old] == [op]
            )
            if write.exclusive and (no_other_user or freed_after):  # B7
                self.resident.discard(write.old)
            if write.new not in stored:
                scratch.append(write.old)
        in_place = [write.new for write in record.writes]
        scratch += [o for o in record.outputs if o not in stored and o not in in_place]
        self.resident |= stored
        self.peak = max(self.peak, self.live() + self.size(scratch) + record.workspace_bytes)
        if op not in self.released:  # B5
            self.open_recipes.discard(op)


def naive_simulation(
    trace: Trace, keep, released=(), written_before=None, link=None, codec_cost=None, prefetch_after=None
):
    """Return live bytes by op, live bytes by unpack, extra seconds and the number of replays."""
    naive = NaiveSimulator(trace, keep, released, written_before, link, codec_cost, prefetch_after)
    forward = naive.forward()
    unpacks = naive.backward()
    return forward, unpacks, naive.extra_s + trace.copying_s, naive.replays


def all_decisions(trace: Trace):
    choices = [(True,) if op.pinned else (True, False) for op in trace.ops]
    return itertools.product(*choices)
