"""The judge: an abstract machine that follows decisions through one step and tracks live bytes and time.

It does what the engine does (Rules 4 to 6): kept values are held once somebody needs them, recomputed ones
are made at their ask by replaying what is missing, offloaded ones leave when they are written and are read back
when they are needed or ahead of that, and everything goes when nobody wants it any more. Every solver and every
baseline is judged here, and here alone. It does not know temporaries inside a replayed op.

Two choices where a trace leaves room, both on the safe side: a value that lives until backward on its own is
alive through the ask at which it is freed; and if its op is to be recomputed, replay makes a second copy,
because a handle cannot reach memory that it does not hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..trace import Trace
from .backward import Backward, Watcher
from .link import Link
from .packing import Packing
from .problem import Problem
from .reading import worth_reading_ahead
from .turns import NO_TURNS, Turns
from .writing import Departures, departures

Bytes = npt.NDArray[np.int64]


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
    written_by: Mapping[int, int] = field(default_factory=dict)
    """By op whose values wait elsewhere: the op before which they are written, or packed."""
    read_after: Mapping[int, int] = field(default_factory=dict)
    """By op whose values are read ahead: the op after whose first fetch that begins, or `WHEN_BACKWARD_BEGINS`."""
    waited_s: float = 0.0
    """Of the extra time: what forward waits for writes and packing, and backward for reads and unpacking."""
    recording_s: float = 0.0
    """Of the extra time: what noting takes."""


def simulate(
    trace: Trace,
    keep: Sequence[int | bool],
    again: Iterable[int] = (),
    written_by: Mapping[int, int] | None = None,
    link: Link | None = None,
    packings: Sequence[Packing] = (),
    read_after: Mapping[int, int] | None = None,
    turns: Turns = NO_TURNS,
) -> Simulation:
    """Judge one set of decisions. For many of one trace, make a `Simulator` once."""
    return Simulator(Problem(trace, link, packings)).run(
        keep, again, turns=turns, offload=written_by or (), written_by=written_by, read_after=read_after or {}
    )


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
        turns: Turns = NO_TURNS,
        offload: Collection[int] = (),
        room_bytes: int = 0,
        written_by: Mapping[int, int] | None = None,
        read_after: Mapping[int, int] | None = None,
        max_replays: int | None = None,
        watcher: Watcher | None = None,
    ) -> Simulation:
        """Follow the decisions through forward and backward: O(ops + asks + replays).

        What the ops in `again` make does not rest in backward, until they turn. What the ops in `offload` make is
        written while ops go on, and leaves when nobody reads it any more. Ops wait for that where `written_by` says so,
        or else where more than `room_bytes` would be alive. It is read ahead as `read_after` says, or else where that
        saves time and no more than `room_bytes` are alive then.
        """
        again_set = frozenset(again)
        self.problem.check_decisions(keep, again_set.union(turns), offload)
        keep = self.problem.obeyed(keep)
        again_set = frozenset(j for j in again_set if not keep[j])
        turns = {j: asks for j, asks in turns.items() if not keep[j]}
        ends, wanted_until = self._forward_ends(keep)
        away = self._away(keep, offload, wanted_until)
        left = self._departures(away, ends, room_bytes, written_by)
        forward_live = self._forward_live(ends, away)

        def followed(reads: Mapping[int, int], watcher: Watcher | None = None) -> Backward:
            backward = Backward(self.problem, keep, again_set, wanted_until, max_replays, away, reads, turns)
            backward.watcher = watcher
            backward.follow()
            return backward

        if watcher is not None and left.waited_s:
            watcher.waits(left.waited_s)
        backward = followed(read_after or {}, watcher)
        if read_after is None:
            last_live = int(forward_live[-1]) if len(forward_live) else 0
            ahead = worth_reading_ahead(
                self.problem, away, backward.fetches, last_live_bytes=last_live, room_bytes=room_bytes
            )
            if ahead:
                backward = min(backward, followed(ahead), key=lambda one: one.extra_s)
        # What is taken before the first ask is taken beside forward's last op, as in a profile.
        forward_live[-1:] += backward.begun_bytes
        ask_live = np.array(backward.answers, dtype=np.int64) + self._ask_other
        peak_bytes, peak_at = _peak(forward_live, ask_live)
        extra_s = left.waited_s + backward.extra_s
        recording_s = self.problem.recording_s([j for j, kept in enumerate(keep) if not kept], left.written_by)
        return Simulation(
            peak_bytes=peak_bytes,
            peak_at=peak_at,
            forward_live=forward_live,
            ask_live=ask_live,
            extra_s=extra_s + recording_s,
            step_s=self.problem.trace.step_s + extra_s + recording_s,
            replayed_ops=backward.replayed_ops,
            replays=tuple(backward.replays),
            written_by=left.written_by,
            read_after=dict(backward.read_after),
            waited_s=left.waited_s + backward.waited_s,
            recording_s=recording_s,
        )

    def forward_ends(self, keep: Sequence[int | bool], written_by: Mapping[int, int] | None = None) -> list[int]:
        """By value: the last op while which it is alive in forward; the number of ops: into backward."""
        ends, wanted_until = self._forward_ends(keep)
        self._departures(self._away(keep, written_by or (), wanted_until), ends, 0, written_by)
        return ends

    def held_into_backward(self, keep: Sequence[int | bool], offload: Collection[int] = ()) -> list[int]:
        """The values that we hold in memory when backward begins."""
        problem = self.problem
        _, wanted_until = self._forward_ends(keep)
        wanted = [int(v) for v in self._made if wanted_until[v] >= problem.n_ops]
        away = frozenset(self._away(keep, offload, wanted_until))
        return [v for v in wanted if keep[problem.maker[v]] and v not in away]

    def held_elsewhere(self, keep: Sequence[int | bool], offload: Collection[int]) -> list[int]:
        """The values that are in the store, or packed, when backward begins."""
        return self._away(keep, offload, self._forward_ends(keep)[1])

    def holders(
        self,
        keep: Sequence[int | bool],
        again: Iterable[int],
        at: PeakAt,
        written_by: Mapping[int, int] | None = None,
        read_after: Mapping[int, int] | None = None,
        turns: Turns = NO_TURNS,
    ) -> list[int]:
        """The values that are alive at the fullest moment of that op or ask, largest first."""
        problem = self.problem
        ends, wanted_until = self._forward_ends(keep)
        away = self._away(keep, written_by or (), wanted_until)
        self._departures(away, ends, 0, written_by)
        if at.phase == "forward":
            alive = [int(v) for v in self._made if problem.maker[v] <= at.index <= ends[v]]
        else:
            backward = Backward(problem, keep, frozenset(again), wanted_until, None, away, read_after or {}, turns)
            backward.begin()
            for k in range(at.index):
                backward.answer(k)
            backward.watching = True
            backward.answer(at.index)
            alive = backward.seen
        return sorted(alive, key=lambda v: (-problem.nbytes[v], v))

    def _away(self, keep: Sequence[int | bool], offload: Collection[int], wanted_until: list[int]) -> list[int]:
        """The values of these ops that backward will need, as far as they move."""
        problem = self.problem
        return [v for j in offload if keep[j] for v in problem.moved(j) if wanted_until[v] >= problem.n_ops]

    def _departures(
        self, away: list[int], ends: list[int], room_bytes: int, written_by: Mapping[int, int] | None
    ) -> Departures:
        """When they leave; `ends` is changed accordingly."""
        if not away:
            return Departures({}, {}, 0.0)
        for v in away:
            ends[v] = self.problem.natural_end[v]
        live = self._forward_live(ends, away)
        left = departures(self.problem, sorted(away), live.tolist(), room_bytes=room_bytes, written_by=written_by)
        for v, end in left.ends.items():
            ends[v] = end
        return left

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

    def _forward_live(self, ends: list[int], away: Sequence[int] = ()) -> Bytes:
        problem, n = self.problem, self.problem.n_ops
        change = np.zeros(n + 2, dtype=np.int64)
        for v in away:
            packing = problem.packing[v]
            if packing is not None:  # from the moment it is made; packing takes some memory itself, for a moment
                work = packing.workspace(problem.nbytes[v])
                change[problem.maker[v] + 1] += problem.resting_bytes(v) + work
                change[min(problem.maker[v] + 2, n + 1)] -= work
        np.add.at(change, self._makers, self._sizes)
        np.subtract.at(change, np.minimum(np.array(ends, dtype=np.int64)[self._made], n) + 1, self._sizes)
        live: Bytes = np.cumsum(change[:n]) + self._forward_other
        return live


def _peak(forward_live: Bytes, ask_live: Bytes) -> tuple[int, PeakAt]:
    phases: list[tuple[str, Any]] = [("forward", forward_live), ("ask", ask_live)]
    found = [(int(live.max()), PeakAt(phase, int(live.argmax()))) for phase, live in phases if len(live)]
    return max(found, key=lambda peak: peak[0], default=(0, PeakAt("forward", 0)))
