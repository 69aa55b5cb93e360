"""The engine's rules once more, as plainly as possible: sets, no counters, everything looked up anew.

Written apart from `lowtide.planning.simulator`, to be compared with it. Slow.
"""

from __future__ import annotations

import itertools

from lowtide.records import Trace


class Naive:
    def __init__(
        self, trace: Trace, keep, released=(), written_before=None, link=None, codec_cost=None, prefetch_after=None
    ):
        self.trace, self.keep = trace, list(keep)
        for j, op in enumerate(trace.ops):  # what is written over memory that is kept cannot be made again
            olds = [trace.values[w.old] for w in op.writes if w.old is not None]
            if any(old.made_at is None or self.keep[old.made_at] for old in olds):
                self.keep[j] = True
        self.released = {j for j in released if not self.keep[j]}
        self.n = len(trace.ops)
        self.written_before, self.link, self.prefetch_after = written_before or {}, link, prefetch_after or {}
        self.codec_cost = codec_cost or {}  # by value, of those that are packed where they are away
        self.made = [v for v, value in enumerate(trace.values) if value.made_at is not None]
        self.seconds = 0.0
        self.replays = 0

    def size(self, values) -> int:
        return sum(self.trace.values[v].nbytes for v in values)

    def inputs(self, op):
        return [v for v in self.trace.ops[op].inputs if self.trace.values[v].made_at is not None]

    def kept(self, v):
        return self.keep[self.trace.values[v].made_at]

    def natural(self, v, j) -> bool:
        """Whether v is there during forward op j without us."""
        value = self.trace.values[v]
        readers = [w for w in range(self.n) if v in self.trace.ops[w].inputs]
        if not value.made_at <= j <= max([min(value.held_until, self.n), *readers]):
            return False
        return not any(
            other.storage == value.storage and other.made_at is not None and value.made_at < other.made_at <= j
            for other in self.trace.values
        )

    def recipes(self, roots) -> set[int]:
        """Recomputed ops that can be reached from these values."""
        found, pending = set(), [self.trace.values[v].made_at for v in roots]
        while pending:
            op = pending.pop()
            if op in found or self.keep[op]:
                continue
            found.add(op)
            pending += [self.trace.values[u].made_at for u in self.inputs(op)]
        return found

    def held(self, roots, before) -> set[int]:
        """Kept values that handles on saved values, or recipes of ops before `before`, hold."""
        handles = {v for v in self.trace.saved if v in self.made and self.trace.values[v].made_at < before}
        recipes = {op for op in self.recipes(handles | roots) if op < before}
        needed = handles | {u for op in recipes for u in self.inputs(op)}
        return {v for v in needed if self.kept(v)}

    def forward(self) -> list[int]:
        live = []
        for j in range(self.n):
            there = {v for v in self.made if self.natural(v, j)}
            # The op at hand counts as run: what it overwrites must have been copied before.
            held = {
                v
                for v in self.held(there, j + 1)
                if not self.is_away(v) or j < self.written_before[self.trace.values[v].made_at]
            }
            packed = [v for v in self.codec_cost if self.is_away(v) and self.trace.values[v].made_at < j]
            at_work = [v for v in packed if self.trace.values[v].made_at == j - 1]
            beside = self.packed_size(packed) + sum(self.workspace(v) for v in at_work)
            begun = self.to_be_read(-1) if j == self.n - 1 else []
            live.append(self.trace.ops[j].other_bytes + self.size(there | held) + beside + self.size(begun))
        for v in self.codec_cost:
            if self.is_away(v):
                self.seconds += self.codec_cost[v].compression_s(self.trace.values[v].nbytes)
        return live

    def is_away(self, v) -> bool:
        """Whether v waits elsewhere: what only forward needs does not, nor what its op's codec does not take."""
        op = self.trace.values[v].made_at
        packs = any(other in self.codec_cost for other in self.trace.ops[op].outputs)
        return op in self.written_before and (not packs or v in self.codec_cost) and v in self.held(set(), self.n)

    def to_be_read(self, event) -> list[int]:
        """What is in the store and to be read ahead from this event on, in that order."""
        mine = [v for v in self.made if self.is_away(v) and v not in self.codec_cost]
        mine = [v for v in mine if self.prefetch_after.get(self.trace.values[v].made_at) == event]
        return sorted(mine, key=lambda v: (-self.trace.values[v].made_at, v))

    def packed_size(self, values) -> int:
        return sum(self.codec_cost[v].compressed_bytes(self.trace.values[v].nbytes) for v in values)

    def workspace(self, v) -> int:
        return self.codec_cost[v].workspace_bytes(self.trace.values[v].nbytes)

    def backward(self) -> list[int]:
        saved = [v for v in self.made if v in self.trace.saved]
        unpacks = self.trace.unpacks
        self.handles = set(saved)
        self.open_recipes = self.recipes(saved)
        self.resident = {v for v in self.held(set(), self.n) if not self.is_away(v)}
        self.original = set(self.resident)
        self.packed = {v for v in self.codec_cost if self.is_away(v)}
        self.given: set[int] = set()
        self.now = 0.0  # since backward has begun
        self.reads: list[tuple[int, float, float]] = []  # value, when its turn could come, how long it takes
        self.coming: set[int] = set()  # being read ahead, or read and not yet fetched
        self.fetched_ops: set[int] = set()
        self.begin_reading(-1)
        peaks = []
        for k, unpack in enumerate(unpacks):
            self.k = k
            self.peak = self.live()
            if unpack.value in self.made:
                self.given.add(unpack.value)
                if unpack.value not in self.resident:
                    self.resolve(unpack.value)
            while_answering = self.peak + unpack.other_bytes - unpack.rise_bytes
            peaks.append(max(while_answering, self.live() + unpack.other_bytes))
            if k + 1 == len(unpacks) or unpacks[k + 1].node != unpack.node:
                later = {a.value for a in unpacks[k + 1 :]}
                gone = {a.value for a in unpacks if a.node == unpack.node} - later
                self.handles -= gone
                self.given -= gone
                self.resident -= {v for v in gone if self.trace.values[v].made_at in self.released}
                self.collect()
            self.now += unpack.time_s
        return peaks

    def stays_for_good(self, op) -> bool:
        return op not in self.released

    def begin_reading(self, event) -> None:
        for v in self.to_be_read(event):
            if v in self.resident or v in self.coming or not self.wanted(v):
                continue
            nbytes = self.trace.values[v].nbytes
            taken = self.link.prefetch_s_each + nbytes * self.link.prefetch_s_per_byte
            self.seconds += taken
            self.now += taken
            self.reads.append((v, self.now, nbytes / (self.link.prefetch_bytes_per_s or self.link.in_bytes_per_s)))
            self.coming.add(v)

    def read_by(self, v) -> float:
        """When v has been read: one after the other, each when its turn could come or later."""
        end = 0.0
        for other, earliest, takes in self.reads:
            end = max(end, earliest) + takes
            if other == v:
                break
        return end

    def fetch(self, v) -> None:
        if v in self.coming:
            waits = max(0.0, self.read_by(v) - self.now)
            self.coming.discard(v)
        else:
            waits = self.link.fetch_s + self.trace.values[v].nbytes / self.link.in_bytes_per_s
        self.seconds += waits
        self.now += waits
        self.resident.add(v)
        op = self.trace.values[v].made_at
        if op not in self.fetched_ops:
            self.fetched_ops.add(op)
            self.begin_reading(op)
        self.peak = max(self.peak, self.live())

    def live(self, extra=()) -> int:
        def still(value):
            return value.held_until >= self.n + self.k

        others = {v for v in self.made if self.natural(v, self.n) and still(self.trace.values[v])}
        shared = others & self.original
        # A second copy, made by replay, counts beside what the user holds.
        return (
            self.size(shared | (self.resident & self.original))
            + self.size(others - shared)
            + self.size(self.resident - self.original)
            + self.packed_size(self.packed)
            + self.size(self.coming)
        )

    def wanted(self, v) -> bool:
        return v in self.handles or any(v in self.inputs(op) for op in self.open_recipes)

    def collect(self) -> None:
        while True:
            dead = {op for op in self.open_recipes if not any(self.wanted(o) for o in self.trace.ops[op].outputs)}
            self.open_recipes -= dead
            if not dead:
                break
        self.resident = {v for v in self.resident if self.wanted(v)}
        self.packed = {v for v in self.packed if self.wanted(v)}
        self.coming = {v for v in self.coming if self.wanted(v)}

    def resolve(self, asked) -> None:
        stack = [(asked, None)]
        waiting: list[tuple[int, int]] = []  # (value, op that waits for it)
        while stack:
            v, _ = stack[-1]
            if v in self.resident:
                stack.pop()
                continue
            if self.is_away(v):
                if v in self.codec_cost:
                    self.resident.add(v)
                    self.seconds += self.codec_cost[v].decompression_s(self.trace.values[v].nbytes)
                    self.now += self.codec_cost[v].decompression_s(self.trace.values[v].nbytes)
                    self.peak = max(self.peak, self.live() + self.workspace(v))
                    self.packed.discard(v)
                else:
                    self.fetch(v)
                stack.pop()
                continue
            op = self.trace.values[v].made_at
            missing = [u for u in self.inputs(op) if u not in self.resident]
            if missing:
                stack += [(u, op) for u in missing]
                waiting += [(u, op) for u in missing]
                continue
            self.run(op, waiting)
            waiting = [(u, w) for u, w in waiting if w != op]
            transient = {
                u
                for u in self.resident
                if self.trace.values[u].made_at in self.released
                and u not in self.given
                and not any(u == x for x, _ in waiting)
            }
            self.resident -= transient
            self.collect()
            stack.pop()

    def run(self, op, waiting) -> None:
        record = self.trace.ops[op]
        assert op in self.open_recipes
        took = (record.time_s if record.replay_s is None else record.replay_s) + self.trace.replay_overhead_s
        self.seconds += took
        self.now += took
        self.replays += 1
        new = {o for o in record.outputs if self.wanted(o) and o not in self.resident}
        scratch = []
        for write in record.writes:
            if write.old is None or write.old not in self.made:
                continue
            others = [w for w in self.open_recipes if w != op and write.old in self.inputs(w)]
            unwanted = self.stays_for_good(op) and not others and write.old not in self.handles
            goes = (
                self.trace.values[write.old].made_at in self.released
                and write.old not in self.given
                and [w for u, w in waiting if u == write.old] == [op]
            )
            if write.exclusive and (unwanted or goes):
                self.resident.discard(write.old)
            if write.new not in new:
                scratch.append(write.old)
        in_place = [write.new for write in record.writes]
        scratch += [o for o in record.outputs if o not in new and o not in in_place]
        self.resident |= new
        self.peak = max(self.peak, self.live() + self.size(scratch))
        if self.stays_for_good(op):
            self.open_recipes.discard(op)


def naive_simulation(
    trace: Trace, keep, released=(), written_before=None, link=None, codec_cost=None, prefetch_after=None
):
    """(forward live bytes, live bytes by ask, extra seconds, replays); `written_before`: what is offloaded, and when"""
    naive = Naive(trace, keep, released, written_before, link, codec_cost, prefetch_after)
    forward = naive.forward()
    unpacks = naive.backward()
    return forward, unpacks, naive.seconds + trace.copying_s, naive.replays


def all_decisions(trace: Trace):
    choices = [(True,) if op.pinned else (True, False) for op in trace.ops]
    return itertools.product(*choices)
