"""The simulator of timelines: follows decisions through one step and computes live bytes and time.

It is the judge of all timeline plans. It is one loop over the events, with the rules B1 to B12 of `planning.backward`
as far as they apply, and these:

T1. Recording. A recorded op has a recipe from when it runs. The recipe is deleted when no output has a user (B1) and
    none is in memory that new ops and handles can refer to.
T2. Holding. When a value gets a user, lowtide holds it if its op has no recipe, or if the op is held into its first
    stage and the value has not been dropped yet. It shares the memory of others, if they hold the value.
T3. Drop. After the last unpack of a stage that needs it, a value is dropped unless it is held into the next stage. It
    can be replayed. A value whose recipe has been deleted is not dropped.
T4. Replay. The recipe is deleted after a replay, unless an output is still to be dropped (T3) or a handle outlives all
    drops. So a value that is not dropped stays in memory until its last user is gone.
T5. Nodes. A backward node holds what it unpacked until it ends, also if the value is dropped in between.
T6. Memory that is overwritten. A replay at or after the event that overwrites an outside input is late: the plan is
    wrong.
T7. At each event, new values, users and replays come first, then the live bytes are taken, then handles are freed,
    others let values go, and values are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..._errors import ArgumentError
from .decisions import Decisions, normalised
from .stage_table import StageTable

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StepSimulation:
    """Live bytes and time of one simulated step."""

    peak_bytes: int
    peak_at: int
    """The first event with the most live bytes."""
    live: Bytes
    """By event: the most live bytes from this event to the next."""
    extra_s: float
    """Time beyond that of the plain step."""
    step_s: float
    replays: tuple[int, ...]
    """By op: number of replays."""
    replayed_at: tuple[tuple[int, int], ...]
    """By replay: unpack event and op."""
    late_replays: int
    """Replays of ops that read memory which has been overwritten (T6)."""

    @property
    def replayed_ops(self) -> int:
        """Number of replays."""
        return len(self.replayed_at)

    def fits(self, budget_bytes: int) -> bool:
        """Return whether a step can follow the decisions within the budget."""
        return self.peak_bytes <= budget_bytes and not self.late_replays


class StepListener(Protocol):
    """Receives what a simulated step does, in order."""

    def copies_changed(self, value: int, own: int, others: int) -> None:
        """Copies of a value that lowtide (`own`) and others hold change by these numbers: -1, 0 or 1."""

    def replayed(self, event: int, op: int, scratch_bytes: int) -> None:
        """An op was replayed for an unpack. Its scratch and the inputs to be freed are still live."""

    def happened(self, event: int) -> None:
        """An op of the step has run, or an unpack is complete and its node runs next."""


class StepSimulator:
    """Simulates decisions for one trace and one table of stages."""

    def __init__(self, table: StageTable) -> None:
        self.table = table

    def run(self, decisions: Sequence[int], listener: StepListener | None = None) -> StepSimulation:
        """Simulate the step, in O(events + users + replays). Raises `ArgumentError` for the wrong number of ops."""
        facts = self.table.facts
        if len(decisions) != facts.n_ops:
            raise ArgumentError(f"{len(decisions)} decisions for {facts.n_ops} ops")
        state = _StepState(self.table, normalised(self.table, decisions), listener)
        for event in range(facts.n_events):
            state.happen(event)
        live = np.array(state.live_at, dtype=np.int64)
        replays = [0] * facts.n_ops
        for _, op in state.replayed_at:
            replays[op] += 1
        extra_s = math.fsum(facts.replay_s[op] for _, op in state.replayed_at)
        return StepSimulation(
            peak_bytes=int(live.max(initial=0)),
            peak_at=int(live.argmax()) if len(live) else 0,
            live=live,
            extra_s=extra_s,
            step_s=facts.trace.step_s + extra_s,
            replays=tuple(replays),
            replayed_at=tuple(state.replayed_at),
            late_replays=state.late_replays,
        )

    def holders(self, decisions: Sequence[int], event: int) -> list[int]:
        """Return the values that are alive when the most bytes are live at an event, largest first."""
        nbytes = self.table.facts.nbytes
        recorder = _PeakRecorder(self.table, event)
        self.run(decisions, recorder)
        return sorted(recorder.peak_values, key=lambda v: (-nbytes[v], v))


class _PeakRecorder:
    """Notes which values are alive at the peak of one event."""

    def __init__(self, table: StageTable, event: int) -> None:
        self.peak_values: list[int] = []
        self._facts = table.facts
        self._event = event
        self._copies: dict[int, int] = {}
        self._peak_bytes = -1

    def copies_changed(self, value: int, own: int, others: int) -> None:
        self._copies[value] = self._copies.get(value, 0) + own + others

    def replayed(self, event: int, op: int, scratch_bytes: int) -> None:
        if event == self._event:
            self._compare(scratch_bytes - self._facts.rise_bytes[event])

    def happened(self, event: int) -> None:
        if event == self._event:
            self._compare(0)

    def _compare(self, more_bytes: int) -> None:
        nbytes = self._facts.nbytes
        live = sum(copies * nbytes[v] for v, copies in self._copies.items()) + more_bytes
        if live > self._peak_bytes:
            self._peak_bytes = live
            self.peak_values = [v for v, copies in self._copies.items() if copies > 0]


class _StepState:
    """The state of a simulated step after some events."""

    def __init__(self, table: StageTable, decisions: Decisions, listener: StepListener | None) -> None:
        facts = table.facts
        self.table = table
        self.facts = facts
        self.decisions = decisions
        self.listener = listener
        self.live_at: list[int] = []
        self.replayed_at: list[tuple[int, int]] = []
        self.late_replays = 0
        self._now = -1
        self._live = 0
        self._users = [0] * facts.n_values  # B1
        self._own = [False] * facts.n_values  # lowtide holds it
        self._shared = [False] * facts.n_values  # lowtide holds the memory that others hold, or have held
        self._others = [False] * facts.n_values  # others hold it
        self._known = [False] * facts.n_values  # new ops and handles can refer to it (T1)
        self._holding = [op >= 0 and bool(decisions[op] & 1) for op in facts.producer]  # T2
        self._recipe = [False] * facts.n_ops
        self._last_drop = [table.last_drop(j, decision) for j, decision in enumerate(decisions)]
        self._node_holds_until: dict[int, int] = {}  # by value (T5)
        self._node_ends: dict[int, list[int]] = {}  # by event: dropped values that a node holds until then

    def happen(self, event: int) -> None:
        """Simulate the next event."""
        self._now = event
        op = self.facts.op_at[event]
        most = self._live
        if op >= 0:
            self._run_op(op)
        elif (value := self.facts.unpack_value[event]) >= 0:
            if not self._own[value]:
                most = max(most, self._make_resident(value))
            self._node_holds_until[value] = self.facts.node_busy_until[event]
        for v in self.facts.saved_after[event]:
            self._add_user(v)
        for v in self.facts.known_ends_in[event]:
            self._forget_memory(v)
        if op < 0:
            most = max(most - self.facts.rise_bytes[event], self._live)  # B12
        else:
            most = self._live
        self.live_at.append(most + self.facts.other_bytes[event])
        if self.listener is not None:
            self.listener.happened(event)
        self._end(event)

    def _end(self, event: int) -> None:
        """Free what is not needed after an event (T7)."""
        facts = self.facts
        for v in facts.freed_after[event]:
            self._remove_user(v)
        for v in facts.natural_ends_after[event]:
            self._others[v] = False
            if not (self._own[v] and self._shared[v]):
                self._change_bytes(v, 0, -1)
            elif self.listener is not None:
                self.listener.copies_changed(v, 1, -1)
        for v in facts.known_ends_after[event]:
            self._forget_memory(v)
        for v in self._node_ends.pop(event, ()):
            self._change_bytes(v, -1, 0)
        for v, op, position in self.table.drops_after[event]:
            if not self.decisions[op] >> position & 1:
                self._drop(v, op)

    def _run_op(self, op: int) -> None:
        for v in self.facts.outputs[op]:
            self._others[v] = self._known[v] = True
            self._change_bytes(v, 0, 1)
        if self.decisions[op] >= 0:  # T1
            self._recipe[op] = True
            for u in self.facts.inputs[op]:
                self._add_user(u)

    def _add_user(self, v: int) -> None:
        self._users[v] += 1
        if self._own[v] or not (self._holding[v] or not self._recipe[self.facts.producer[v]]):
            return
        self._own[v] = True  # T2
        self._shared[v] = self._others[v]
        if not self._shared[v]:
            self._change_bytes(v, 1, 0)

    def _remove_user(self, v: int) -> None:
        self._users[v] -= 1
        if not self._users[v]:
            self._free(v)
            self._delete_if_useless(self.facts.producer[v])

    def _forget_memory(self, v: int) -> None:
        """From now on, no new op or handle refers to a value."""
        self._known[v] = False
        self._delete_if_useless(self.facts.producer[v])

    def _drop(self, v: int, op: int) -> None:
        self._holding[v] = False
        if not (self._own[v] and self._recipe[op]):  # T3
            return
        until = self._node_holds_until.get(v, -1)
        if until > self._now and not (self._shared[v] and self._others[v]):  # T5
            self._own[v] = False
            self._node_ends.setdefault(until, []).append(v)
        else:
            self._free(v)

    def _free(self, v: int) -> None:
        """Free lowtide's tensor of a value."""
        if not self._own[v]:
            return
        self._own[v] = False
        if not (self._shared[v] and self._others[v]):
            self._change_bytes(v, -1, 0)
        self._shared[v] = False

    def _delete_if_useless(self, op: int) -> None:
        if self._is_useless(op):
            self._delete_recipe(op)

    def _is_useless(self, op: int) -> bool:
        return self._recipe[op] and not any(self._users[v] or self._known[v] for v in self.facts.outputs[op])

    def _delete_recipe(self, op: int) -> None:
        """Delete a recipe, and all values and recipes that lose their last user by this (B1)."""
        deleted = [op]
        self._recipe[op] = False
        while deleted:
            for u in self.facts.inputs[deleted.pop()]:
                self._users[u] -= 1
                if not self._users[u]:
                    self._free(u)
                    producer = self.facts.producer[u]
                    if self._is_useless(producer):
                        self._recipe[producer] = False
                        deleted.append(producer)

    def _make_resident(self, value: int) -> int:
        """Bring a value into memory (B3). Return the most live bytes meanwhile."""
        own, pending, peak = self._own, [value], self._live
        while pending:
            v = pending[-1]
            if own[v]:
                pending.pop()
                continue
            op = self.facts.producer[v]
            missing = [u for u in self.facts.inputs[op] if not own[u]]
            if missing:
                pending += missing
                continue
            peak = max(peak, self._replay(op))
            pending.pop()
        return peak

    def _replay(self, op: int) -> int:
        """Replay an op whose inputs are in memory. Return the live bytes during the replay."""
        facts = self.facts
        assert self._recipe[op], f"op {op} without a recipe is needed at event {self._now}"
        self.replayed_at.append((self._now, op))
        self.late_replays += self._now >= facts.reads_until[op]  # T6
        is_last = self._last_drop[op] < self._now and not self.table.tailed[op]  # T4
        stored = [v for v in facts.outputs[op] if self._users[v] and not self._own[v]]
        scratch_bytes = self._write_in_place(op, stored, is_last)
        written = {write.new for write in facts.writes[op]}
        scratch_bytes += sum(facts.nbytes[v] for v in facts.outputs[op] if v not in stored and v not in written)
        scratch_bytes += facts.workspace_bytes[op]
        for v in stored:
            self._own[v] = True
            self._shared[v] = False
            self._change_bytes(v, 1, 0)
        if self.listener is not None:
            self.listener.replayed(self._now, op, scratch_bytes)
        live_bytes = self._live + scratch_bytes
        if is_last:
            self._delete_recipe(op)
        return live_bytes

    def _write_in_place(self, op: int, stored: list[int], is_last: bool) -> int:
        """Free the inputs that a replay overwrites (B7). Return the bytes of copies written for results not stored."""
        scratch_bytes = 0
        for write in self.facts.writes[op]:
            if write.old is None:
                continue
            if write.exclusive and is_last and self._users[write.old] == 1:
                self._free(write.old)
            if write.new not in stored:
                scratch_bytes += self.facts.nbytes[write.old]
        return scratch_bytes

    def _change_bytes(self, v: int, own: int, others: int) -> None:
        self._live += (own + others) * self.facts.nbytes[v]
        if self.listener is not None:
            self.listener.copies_changed(v, own, others)
