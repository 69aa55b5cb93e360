"""The judge: an abstract machine that follows decisions through one step and tracks live bytes and time.

It does what the engine does (Rules 4 to 6): kept values are held once somebody needs them, recomputed ones
are made at their ask by replaying what is missing, and everything goes when nobody wants it any more. Every
solver and every baseline is judged here, and here alone. It does not know temporaries inside a replayed op.

Two choices where a trace leaves room, both on the safe side: a value that lives until backward on its own is
alive through the ask at which it is freed; and if its op is to be recomputed, replay makes a second copy,
because a handle cannot reach memory that it does not hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .._errors import LowtideError
from ..trace import Trace
from .problem import Problem

Bytes = npt.NDArray[np.int64]


class TooManyReplaysError(LowtideError):
    """A simulation was cut short: the decisions replay more ops than the caller is willing to follow."""


@dataclass(frozen=True)
class PeakAt:
    """Where the peak is: at a forward op or at an ask of backward."""

    phase: str
    """"forward" or "ask"."""
    index: int


@dataclass(frozen=True, eq=False)
class Simulation:
    """What would happen."""

    peak_bytes: int
    peak_at: PeakAt
    forward_live: Bytes
    """By op: live bytes while it runs."""
    ask_live: Bytes
    """By ask: the most live bytes while it is answered and until the next."""
    extra_s: float
    step_s: float
    replayed_ops: int
    replays: tuple[int, ...]
    """By op: how often it is replayed."""


class Watcher(Protocol):
    """Follows backward: whose bytes come and go, and each moment at which they are counted."""

    def change(self, value: int, ours: int, others: int) -> None:
        """By how many (-1, 0, 1) the copies of a value change that we hold, and that others hold."""

    def moment(self, ask: int, replayed: int | None, scratch_bytes: int) -> None:
        """An op is being replayed for this ask, with results that nobody wants; or (None) the ask is answered."""


def simulate(trace: Trace, keep: Sequence[int | bool], again: Iterable[int] = ()) -> Simulation:
    """Judge one set of decisions. For many of one trace, make a `Simulator` once."""
    return Simulator(Problem(trace)).run(keep, again)


class Simulator:
    """Judges decisions for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        trace = problem.trace
        made = np.array([v for v in range(problem.n_values) if problem.maker[v] >= 0], dtype=np.int64)
        self._made = made
        self._sizes = np.array(problem.nbytes, dtype=np.int64)[made]
        self._makers = np.array(problem.maker, dtype=np.int64)[made]
        self._forward_other = np.array([op.other_bytes for op in trace.ops], dtype=np.int64)
        self._ask_other = np.array([ask.other_bytes for ask in trace.asks], dtype=np.int64)
        self._recipe_end = [min(end, problem.n_ops - 1) for end in problem.natural_end]

    def run(
        self,
        keep: Sequence[int | bool],
        again: Iterable[int] = (),
        *,
        max_replays: int | None = None,
        watcher: Watcher | None = None,
    ) -> Simulation:
        """Follow the decisions through forward and backward: O(ops + asks + replays)."""
        again_set = frozenset(again)
        self.problem.check_decisions(keep, again_set)
        keep = self.problem.obeyed(keep)
        again_set = frozenset(j for j in again_set if not keep[j])
        ends, wanted_until = self._forward_ends(keep)
        forward_live = self._forward_live(ends)
        backward = _Backward(self.problem, keep, again_set, wanted_until, max_replays)
        backward.watcher = watcher
        ask_live = np.array([backward.answer(k) for k in range(self.problem.n_asks)], dtype=np.int64) + self._ask_other
        peak_bytes, peak_at = _peak(forward_live, ask_live)
        return Simulation(
            peak_bytes=peak_bytes,
            peak_at=peak_at,
            forward_live=forward_live,
            ask_live=ask_live,
            extra_s=backward.extra_s,
            step_s=self.problem.trace.step_s + backward.extra_s,
            replayed_ops=backward.replayed_ops,
            replays=tuple(backward.replays),
        )

    def forward_ends(self, keep: Sequence[int | bool]) -> list[int]:
        """By value: the last op while which it is alive in forward; the number of ops: into backward."""
        return self._forward_ends(keep)[0]

    def held_into_backward(self, keep: Sequence[int | bool]) -> list[int]:
        """The values that we hold when backward begins."""
        problem = self.problem
        _, wanted_until = self._forward_ends(keep)
        return [int(v) for v in self._made if keep[problem.maker[v]] and wanted_until[v] >= problem.n_ops]

    def holders(self, keep: Sequence[int | bool], again: Iterable[int], at: PeakAt) -> list[int]:
        """The values that are alive at the fullest moment of that op or ask, largest first."""
        problem = self.problem
        ends, wanted_until = self._forward_ends(keep)
        if at.phase == "forward":
            alive = [int(v) for v in self._made if problem.maker[v] <= at.index <= ends[v]]
        else:
            backward = _Backward(problem, keep, frozenset(again), wanted_until, None)
            for k in range(at.index):
                backward.answer(k)
            backward.watching = True
            backward.answer(at.index)
            alive = backward.seen
        return sorted(alive, key=lambda v: (-problem.nbytes[v], v))

    def _forward_ends(self, keep: Sequence[int | bool]) -> tuple[list[int], list[int]]:
        """Until which op each value is there, and until when a handle or a recipe wants it.

        A recipe lives as long as one of its outputs is wanted or alive, and wants its inputs as long. The
        number of ops stands for "into backward", which only handles reach.
        """
        problem = self.problem
        n = problem.n_ops
        wanted_until = [n if saved else -1 for saved in problem.saved]
        ends = list(problem.natural_end)
        recipe_end = self._recipe_end
        inputs, outputs = problem.inputs, problem.outputs
        for j in range(n - 1, -1, -1):
            if keep[j]:
                for v in outputs[j]:
                    if wanted_until[v] > ends[v]:
                        ends[v] = wanted_until[v]
            else:
                end = -1
                for v in outputs[j]:
                    end = max(end, recipe_end[v], wanted_until[v])
                for v in inputs[j]:
                    if end > wanted_until[v]:
                        wanted_until[v] = end
        return ends, wanted_until

    def _forward_live(self, ends: list[int]) -> Bytes:
        n = self.problem.n_ops
        change = np.zeros(n + 2, dtype=np.int64)
        np.add.at(change, self._makers, self._sizes)
        np.subtract.at(change, np.minimum(np.array(ends, dtype=np.int64)[self._made], n) + 1, self._sizes)
        live: Bytes = np.cumsum(change[:n]) + self._forward_other
        return live


class _Backward:
    """The state of backward between two asks."""

    def __init__(
        self,
        problem: Problem,
        keep: Sequence[int | bool],
        again: frozenset[int],
        wanted_until: list[int],
        max_replays: int | None,
    ) -> None:
        n = problem.n_ops
        self.problem = problem
        self.again = again
        self.extra_s = 0.0
        self.replayed_ops = 0
        self.replays = [0] * n
        self.watching = False
        self.seen: list[int] = []
        self.watcher: Watcher | None = None
        self._limit = max_replays
        self._resident = [False] * problem.n_values
        self._answered = [False] * problem.n_values  # asked for, and its handle not yet gone
        self._natural = [False] * problem.n_values  # alive without us, and not resident
        self._leaves_after: dict[int, list[int]] = {}  # by ask: natural values that go after it
        self._stays_until: dict[int, int] = {}  # resident values that are alive until that ask anyway
        self._ask = 0
        self._noted_bytes = -1
        # Handles and recipes not yet run that want a value.
        self._wants = [1 if saved else 0 for saved in problem.saved]
        self._recipe = [False] * n
        self._live = 0
        self._pushes: dict[int, int] = {}  # in the resolve at hand: ops that wait for a value
        for j in range(n):
            if not keep[j] and any(wanted_until[v] >= n for v in problem.outputs[j]):
                self._recipe[j] = True
                for v in problem.inputs[j]:
                    self._wants[v] += 1
        for v in range(problem.n_values):
            maker = problem.maker[v]
            if maker < 0:
                continue
            if keep[maker] and self._wants[v]:
                self._resident[v] = True
                self._live += problem.nbytes[v]
                if problem.natural_last_ask[v] >= 0:
                    self._stays_until[v] = problem.natural_last_ask[v]
            elif problem.natural_last_ask[v] >= 0:
                self._stay_on(v)
                self._live += problem.nbytes[v]

    def answer(self, k: int) -> int:
        """Answer ask k; the most bytes of ours alive at any moment of it."""
        problem = self.problem
        self._ask = k
        most = self._live
        if self.watching:
            self._note()
        v = problem.ask_value[k]
        if problem.maker[v] >= 0:
            self._answered[v] = True
            if not self._resident[v]:
                most = max(most, self._make(v))
        if self.watcher is not None:
            self.watcher.moment(k, None, 0)
        for gone in problem.freed_after[k]:
            self._answered[gone] = False
            self._release(gone)
            if problem.maker[gone] in self.again:
                self._drop(gone)
        for gone in self._leaves_after.pop(k, ()):
            self._natural[gone] = False
            self._live -= problem.nbytes[gone]
            if self.watcher is not None:
                self.watcher.change(gone, 0, -1)
        return most

    def _make(self, wanted: int) -> int:
        """Give `wanted` its memory by replaying whatever is missing on the way to it."""
        problem, resident = self.problem, self._resident
        waiting_for: dict[int, list[int]] = {}  # by op: what was pushed for it
        pending = [wanted]
        most = self._live
        while pending:
            v = pending[-1]
            if resident[v]:
                pending.pop()
                continue
            op = problem.maker[v]
            missing = [u for u in problem.inputs[op] if not resident[u]]
            if missing:
                waiting_for[op] = missing
                for u in missing:
                    self._pushes[u] = self._pushes.get(u, 0) + 1
                pending.extend(missing)
                continue
            most = max(most, self._replay(op))
            for u in waiting_for.pop(op, ()):
                self._pushes[u] -= 1
                if not self._pushes[u]:
                    del self._pushes[u]
                    if problem.maker[u] in self.again:
                        self._drop_unless_answered(u)
            pending.pop()
        return most

    def _replay(self, op: int) -> int:
        """Run one op whose inputs are all there; the live bytes while it ran."""
        problem, resident, wants = self.problem, self._resident, self._wants
        assert self._recipe[op], "an op was forgotten that is still needed"
        self.replayed_ops += 1
        self.replays[op] += 1
        if self._limit is not None and self.replayed_ops > self._limit:
            raise TooManyReplaysError(f"more than {self._limit} replays")
        self.extra_s += problem.time_s[op]
        again = op in self.again
        scratch = 0
        made = [v for v in problem.outputs[op] if wants[v] and not resident[v]]
        for write in problem.writes[op]:
            if write.old is None:
                continue
            if write.alone and wants[write.old] == 1 and not again:
                # Its memory becomes the new value's (Rule 6).
                resident[write.old] = False
                self._live -= problem.nbytes[write.old]
                if self.watcher is not None:
                    self.watcher.change(write.old, -1, 0)
            if write.new not in made:
                scratch += problem.nbytes[write.old]
        written = {write.new for write in problem.writes[op]}
        # The op makes all its results, also those that nobody wants (any more): they go as soon as it has run.
        scratch += sum(problem.nbytes[v] for v in problem.outputs[op] if v not in made and v not in written)
        for v in made:
            resident[v] = True
            self._live += problem.nbytes[v]
        if self.watching:
            self._note(scratch)
        if self.watcher is not None:
            for v in made:
                self.watcher.change(v, 1, 0)
            self.watcher.moment(self._ask, op, scratch)
        during = self._live + scratch
        if again:
            for v in made:
                if v not in self._pushes:
                    self._drop_unless_answered(v)
        else:
            self._forget(op)
        return during

    def _forget(self, op: int) -> None:
        """The recipe is gone, and with it what only it wanted."""
        problem = self.problem
        forgotten = [op]
        self._recipe[op] = False
        while forgotten:
            for u in problem.inputs[forgotten.pop()]:
                self._wants[u] -= 1
                if not self._wants[u]:
                    self._drop(u)
                    maker = problem.maker[u]
                    if self._recipe[maker] and not any(self._wants[o] for o in problem.outputs[maker]):
                        self._recipe[maker] = False
                        forgotten.append(maker)

    def _release(self, v: int) -> None:
        """A handle is gone."""
        self._wants[v] -= 1
        if not self._wants[v]:
            self._drop(v)
            maker = self.problem.maker[v]
            if self._recipe[maker] and not any(self._wants[o] for o in self.problem.outputs[maker]):
                self._forget(maker)

    def _drop(self, v: int) -> None:
        """Nothing of ours holds v any more."""
        if not self._resident[v]:
            return
        self._resident[v] = False
        stays = self._stays_until.get(v, -1) >= self._ask
        if stays:
            self._stay_on(v)
        else:
            self._live -= self.problem.nbytes[v]
        if self.watcher is not None:
            self.watcher.change(v, -1, int(stays))

    def _drop_unless_answered(self, v: int) -> None:
        """What was made as an intermediate is not retained, unless a handle has been given it."""
        if not self._answered[v]:
            self._drop(v)

    def _stay_on(self, v: int) -> None:
        """Its bytes stay, though not for us."""
        self._natural[v] = True
        self._leaves_after.setdefault(self.problem.natural_last_ask[v], []).append(v)

    def _note(self, scratch: int = 0) -> None:
        if self._live + scratch > self._noted_bytes:
            self._noted_bytes = self._live + scratch
            self.seen = [v for v in range(self.problem.n_values) if self._resident[v] or self._natural[v]]


def _peak(forward_live: Bytes, ask_live: Bytes) -> tuple[int, PeakAt]:
    phases: list[tuple[str, Any]] = [("forward", forward_live), ("ask", ask_live)]
    found = [(int(live.max()), PeakAt(phase, int(live.argmax()))) for phase, live in phases if len(live)]
    return max(found, key=lambda peak: peak[0], default=(0, PeakAt("forward", 0)))
