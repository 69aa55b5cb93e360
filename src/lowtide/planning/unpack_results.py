"""Simulation of one unpack for the fast judge: from one state of backward (`BitLayout`) to the next.

The rules are those of `backward`, cited as B1 to B12; rules about offloading do not apply. The simulation also collects
the bits of the state that it reads. From any other state with the same values of these bits, the unpack has the same
result. Searches look at many similar plans, so most results come from a cache.
"""

from __future__ import annotations

from typing import NamedTuple

from .bit_layout import BitLayout


class UnpackResult(NamedTuple):
    """The result of one unpack. Bytes are relative to the live bytes before it."""

    depends_on: int
    """The bits of the state that the result depends on."""
    state_before: int
    """The state in which the unpack was simulated."""
    changed: int
    """The bits of the state that the unpack changes."""
    peak_bytes: int
    """The most live bytes, with the other bytes of the unpack."""
    live_change_bytes: int
    """Live bytes after the unpack."""
    repeats_s: float
    """Time of the replays, without the first one of each op."""
    replays: int

    @classmethod
    def never_valid(cls, layout: BitLayout) -> UnpackResult:
        """Return a result that applies to no state."""
        return cls(layout.unused_bit, layout.unused_bit, 0, 0, 0, 0.0, 0)


class UnpackSimulator:
    """Simulates unpacks of one problem. The attributes are tables that all simulations read."""

    def __init__(self, layout: BitLayout) -> None:
        problem = layout.problem
        n, m = problem.n_ops, len(layout.values)
        self.layout = layout
        self.problem = problem
        self.resident_bit = [1 << v for v in range(m)]
        self.shared_bit = [1 << (layout.shared + v) if layout.natural_last_unpack[v] >= 0 else 0 for v in range(m)]
        self.recipe_bit = [1 << (layout.recipe + j) for j in range(n)]
        self.released_bit = [1 << (layout.released + j) for j in range(n)]
        self.unreplayed_bit = [1 << (layout.unreplayed + j) for j in range(n)]
        self.reader_recipes: list[list[int]] = [[] for _ in range(m)]
        """By value: the recipe bits of the ops that read it, twice if an op reads it twice."""
        for j, inputs in enumerate(layout.inputs):
            for v in inputs:
                self.reader_recipes[v].append(self.recipe_bit[j])
        self.reader_bits = [0] * m
        """By value: the same as a set."""
        for v, recipes in enumerate(self.reader_recipes):
            for recipe in recipes:
                self.reader_bits[v] |= recipe
        self.has_one_output = [len(outputs) == 1 and not problem.writes[j] for j, outputs in enumerate(layout.outputs)]
        """By op: whether it has a single output and writes nothing in place."""
        self.writes = [
            [(layout.number[w.old], layout.number[w.new], w.exclusive) for w in writes if w.old is not None]
            for writes in problem.writes
        ]
        self.written = [frozenset(layout.number[write.new] for write in writes) for writes in problem.writes]
        self.freed_by_others: list[list[int]] = [[] for _ in range(problem.n_unpacks + 1)]
        """By unpack: the values that others free after it (B11)."""
        for v, last in enumerate(layout.natural_last_unpack):
            if last >= 0:
                self.freed_by_others[last].append(v)
        self.other_bytes = [unpack.other_bytes for unpack in problem.trace.unpacks]
        self.simulated_replays = 0
        """Replays of all runs: most of the time that the fast judge takes."""

    def run(self, k: int, state: int, *, limit_s: float, max_replays: int) -> UnpackResult | None:
        """Return the result of unpack k in this state.

        None if it needs more than `max_replays` replays, or if repeated replays take more than `limit_s`.
        """
        layout = self.layout
        run = _Run(self, k, state, limit_s, max_replays)
        value = layout.unpack_value[k]
        if value >= 0:
            run.unpacked |= self.resident_bit[value]
            within_limits = run.make_resident(value)
            self.simulated_replays += run.replays
            if not within_limits:
                return None
        peak = max(run.peak - self.problem.rise_bytes[k], run.live) + self.other_bytes[k]  # B12
        run.free_handles(layout.freed_after[k])
        run.free_by_others(self.freed_by_others[k])
        return UnpackResult(run.depends_on, state, state ^ run.state, peak, run.live, run.repeats_s, run.replays)


class _Run:
    """One simulated unpack. Each method adds the bits that it reads to `depends_on`."""

    __slots__ = (
        "depends_on",
        "handles",
        "limit_s",
        "live",
        "max_replays",
        "peak",
        "repeats_s",
        "replays",
        "state",
        "tables",
        "unpacked",
        "waiting",
    )

    def __init__(self, tables: UnpackSimulator, k: int, state: int, limit_s: float, max_replays: int) -> None:
        self.tables = tables
        self.state = state
        self.depends_on = 0
        self.live = self.peak = 0
        self.repeats_s = 0.0
        self.replays = 0
        self.limit_s = limit_s
        self.max_replays = max_replays
        self.handles = tables.layout.handles[k]
        self.unpacked = tables.layout.unpacked[k]
        self.waiting: dict[int, int] = {}  # number of replays that wait for a value

    def make_resident(self, value: int) -> bool:
        """Bring a value into memory (B3). Return False if this exceeds a limit."""
        tables, waiting = self.tables, self.waiting
        layout, resident_bit, released_bit = tables.layout, tables.resident_bit, tables.released_bit
        producer, inputs, input_bits = layout.producer, layout.inputs, layout.input_bits
        inputs_waited_for: dict[int, list[int]] = {}  # by op
        pending = [value]
        while pending:
            v = pending[-1]
            self.depends_on |= resident_bit[v]
            if self.state & resident_bit[v]:
                pending.pop()
                continue
            op = producer[v]
            self.depends_on |= input_bits[op]
            if input_bits[op] & ~self.state:
                missing = inputs_waited_for[op] = [u for u in inputs[op] if not self.state & resident_bit[u]]
                for u in missing:
                    waiting[u] = waiting.get(u, 0) + 1
                pending += missing
                continue
            if not self.replay(op, v):
                return False
            for u in inputs_waited_for.pop(op, ()):
                if waiting[u] > 1:
                    waiting[u] -= 1
                    continue
                del waiting[u]
                self.depends_on |= released_bit[producer[u]]
                if self.state & released_bit[producer[u]] and not self.unpacked & resident_bit[u]:  # B6
                    self.free(u)
            pending.pop()
        return True

    def replay(self, op: int, v: int) -> bool:
        """Replay an op to get its output v. Return False if this exceeds a limit."""
        tables = self.tables
        resident_bit, nbytes = tables.resident_bit, tables.layout.nbytes
        self.replays += 1
        self.depends_on |= tables.unreplayed_bit[op] | tables.released_bit[op]
        if self.state & tables.unreplayed_bit[op]:  # the first replay is part of `ForwardResult.min_extra_s`
            self.state ^= tables.unreplayed_bit[op]
        else:
            self.repeats_s += tables.problem.replay_s[op]
            if self.repeats_s > self.limit_s:
                return False
        if self.replays > self.max_replays:
            return False
        released = self.state & tables.released_bit[op]
        stored, scratch_bytes = ([v], 0) if tables.has_one_output[op] else self.select_outputs(op, not released)
        scratch_bytes += tables.problem.workspace_bytes[op]  # B4
        for output in stored:
            self.state |= resident_bit[output]
            self.live += nbytes[output]
        if self.live + scratch_bytes > self.peak:
            self.peak = self.live + scratch_bytes
        if not released:  # B5
            self.delete_recipe(op)
            return True
        for output in stored:  # B6
            if output not in self.waiting and not self.unpacked & resident_bit[output]:
                self.free(output)
        return True

    def select_outputs(self, op: int, retained: bool) -> tuple[list[int], int]:
        """Return the outputs that a replay stores and the bytes of the others (B4). Free inputs that it overwrites."""
        tables, layout, nbytes = self.tables, self.tables.layout, self.tables.layout.nbytes
        resident_bit, outputs, written = tables.resident_bit, layout.outputs[op], tables.written[op]
        self.depends_on |= layout.output_bits[op]
        stored = [v for v in outputs if not self.state & resident_bit[v] and self.has_users(v)]
        scratch_bytes = sum([nbytes[v] for v in outputs if v not in stored and v not in written])
        for old, new, exclusive in tables.writes[op]:
            if exclusive and self.may_overwrite(old, retained):
                self.state &= ~resident_bit[old]
                self.live -= nbytes[old]
            if new not in stored:
                scratch_bytes += nbytes[old]
        return stored, scratch_bytes

    def may_overwrite(self, v: int, retained: bool) -> bool:
        """Return whether the replay is the last to need v in this place (B7)."""
        tables = self.tables
        resident, released = tables.resident_bit[v], tables.released_bit[tables.layout.producer[v]]
        self.depends_on |= resident | released | tables.reader_bits[v]
        if self.waiting.get(v) == 1 and self.state & released and not self.unpacked & resident:
            return True
        if not retained:
            return False
        users = sum([1 for recipe in tables.reader_recipes[v] if self.state & recipe])
        return users + (self.handles >> v & 1) == 1

    def delete_recipe(self, op: int) -> None:
        """Delete a recipe, and all values and recipes that lose their last user by this (B1)."""
        tables = self.tables
        inputs, producer, recipe_bit = tables.layout.inputs, tables.layout.producer, tables.recipe_bit
        self.depends_on |= recipe_bit[op]
        self.state &= ~recipe_bit[op]
        deleted = [op]
        while deleted:
            for u in inputs[deleted.pop()]:
                if not self.has_users(u):
                    self.free(u)
                    if self.is_useless(producer[u]):
                        self.state ^= recipe_bit[producer[u]]
                        deleted.append(producer[u])

    def has_users(self, v: int) -> bool:
        """Return whether a handle or a recipe uses v (B1)."""
        tables = self.tables
        if self.handles & tables.resident_bit[v]:
            return True
        readers = tables.reader_bits[v]
        self.depends_on |= readers
        return self.state & readers != 0

    def is_useless(self, op: int) -> bool:
        """Return whether an op has a recipe, and none of its outputs has a user (B1)."""
        recipe = self.tables.recipe_bit[op]
        self.depends_on |= recipe
        return self.state & recipe != 0 and not any(self.has_users(v) for v in self.tables.layout.outputs[op])

    def free(self, v: int) -> None:
        """Free lowtide's copy of v, if it is in memory."""
        tables = self.tables
        resident, shared = tables.resident_bit[v], tables.shared_bit[v]
        self.depends_on |= resident | shared
        if self.state & resident:
            self.state ^= resident
            if not self.state & shared:  # B11: else others hold the same memory
                self.live -= tables.layout.nbytes[v]

    def free_handles(self, values: list[int]) -> None:
        """Free the handles of these values (B10)."""
        tables = self.tables
        for v in values:
            self.handles &= ~tables.resident_bit[v]
            producer = tables.layout.producer[v]
            if not self.has_users(v):
                self.free(v)
                if self.is_useless(producer):
                    self.delete_recipe(producer)
            else:
                self.depends_on |= tables.released_bit[producer]
                if self.state & tables.released_bit[producer]:  # B6
                    self.free(v)

    def free_by_others(self, values: list[int]) -> None:
        """Others free these values (B11)."""
        tables = self.tables
        for v in values:
            resident, shared = tables.resident_bit[v], tables.shared_bit[v]
            self.depends_on |= resident | shared
            if self.state & resident and self.state & shared:
                self.state ^= shared  # now only lowtide holds this memory
            else:
                self.live -= tables.layout.nbytes[v]
