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

from ..records import Trace
from ..records.codec_cost import CodecCost
from ..records.link import Link
from .backward import Backward, Watcher
from .offload import OffloadTimes, offload_times
from .prefetch import choose_prefetches
from .problem import Problem

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
    unpack_live: Bytes
    """By ask: the most live bytes while it is answered and until the next."""
    extra_s: float
    step_s: float
    replayed_ops: int
    replays: tuple[int, ...]
    """By op: how often it is replayed."""
    written_before: Mapping[int, int] = field(default_factory=dict)
    """By op whose values wait elsewhere: the op before which they are written, or packed."""
    prefetch_after: Mapping[int, int] = field(default_factory=dict)
    """By op whose values are read ahead: the op after whose first fetch that begins, or `WHEN_BACKWARD_BEGINS`."""
    store_wait_s: float = 0.0
    """Of the extra time: what forward waits for writes and packing, and backward for reads and unpacking."""


def simulate(
    trace: Trace,
    keep: Sequence[int | bool],
    released: Iterable[int] = (),
    written_before: Mapping[int, int] | None = None,
    link: Link | None = None,
    codec_costs: Sequence[CodecCost] = (),
    prefetch_after: Mapping[int, int] | None = None,
) -> Simulation:
    """Judge one set of decisions. For many of one trace, make a `Simulator` once."""
    return Simulator(Problem(trace, link, codec_costs)).run(
        keep, released, offload=written_before or (), written_before=written_before, prefetch_after=prefetch_after or {}
    )


class Simulator:
    """Judges decisions for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        trace = problem.trace
        made = np.array([v for v in range(problem.n_values) if problem.producer[v] >= 0], dtype=np.int64)
        self._made = made
        self._sizes = np.array(problem.nbytes, dtype=np.int64)[made]
        self._makers = np.array(problem.producer, dtype=np.int64)[made]
        self._forward_other = np.array([op.other_bytes for op in trace.ops], dtype=np.int64)
        self._unpack_other = np.array([unpack.other_bytes for unpack in trace.unpacks], dtype=np.int64)
        self._recipe_end = [min(end, problem.n_ops - 1) for end in problem.natural_end]

    def run(
        self,
        keep: Sequence[int | bool],
        released: Iterable[int] = (),
        *,
        offload: Collection[int] = (),
        limit_bytes: int = 0,
        written_before: Mapping[int, int] | None = None,
        prefetch_after: Mapping[int, int] | None = None,
        max_replays: int | None = None,
        watcher: Watcher | None = None,
    ) -> Simulation:
        """Follow the decisions through forward and backward: O(ops + asks + replays).

        Values of the ops in `released` are released after use. What the ops in `offload` make is
        written while ops run, and leaves memory after its last reader. Ops wait where `written_before` says so,
        or else where more than `limit_bytes` would be alive. It is prefetched as `prefetch_after` says, or else where
        that saves time and at most `limit_bytes` are alive then.
        """
        again_set = frozenset(released)
        self.problem.check_decisions(keep, again_set, offload)
        keep = self.problem.effective_decisions(keep)
        again_set = frozenset(j for j in again_set if not keep[j])
        ends, wanted_until = self._forward_ends(keep)
        away = self._away(keep, offload, wanted_until)
        left = self._departures(away, ends, limit_bytes, written_before)
        forward_live = self._forward_live(ends, away)

        def followed(reads: Mapping[int, int], watcher: Watcher | None = None) -> Backward:
            backward = Backward(self.problem, keep, again_set, wanted_until, max_replays, away, reads)
            backward.watcher = watcher
            backward.follow()
            return backward

        if watcher is not None and left.store_wait_s:
            watcher.waits(left.store_wait_s)
        backward = followed(prefetch_after or {}, watcher)
        if prefetch_after is None:
            last_live = int(forward_live[-1]) if len(forward_live) else 0
            ahead = choose_prefetches(
                self.problem, away, backward.fetches, last_live_bytes=last_live, limit_bytes=limit_bytes
            )
            if ahead:
                backward = min(backward, followed(ahead), key=lambda one: one.extra_s)
        # What is taken before the first ask is taken beside forward's last op, as in a profile.
        forward_live[-1:] += backward.begun_bytes
        unpack_live = np.array(backward.answers, dtype=np.int64) + self._unpack_other
        peak_bytes, peak_at = _peak(forward_live, unpack_live)
        extra_s = left.store_wait_s + backward.extra_s + self.problem.trace.copying_s
        return Simulation(
            peak_bytes=peak_bytes,
            peak_at=peak_at,
            forward_live=forward_live,
            unpack_live=unpack_live,
            extra_s=extra_s,
            step_s=self.problem.trace.step_s + extra_s,
            replayed_ops=backward.replayed_ops,
            replays=tuple(backward.replays),
            written_before=left.written_before,
            prefetch_after=dict(backward.prefetch_after),
            store_wait_s=left.store_wait_s + backward.store_wait_s,
        )

    def forward_ends(self, keep: Sequence[int | bool], written_before: Mapping[int, int] | None = None) -> list[int]:
        """By value: the last op while which it is alive in forward; the number of ops: into backward."""
        ends, wanted_until = self._forward_ends(keep)
        self._departures(self._away(keep, written_before or (), wanted_until), ends, 0, written_before)
        return ends

    def held_into_backward(self, keep: Sequence[int | bool], offload: Collection[int] = ()) -> list[int]:
        """The values that we hold in memory when backward begins."""
        problem = self.problem
        _, wanted_until = self._forward_ends(keep)
        wanted = [int(v) for v in self._made if wanted_until[v] >= problem.n_ops]
        away = frozenset(self._away(keep, offload, wanted_until))
        return [v for v in wanted if keep[problem.producer[v]] and v not in away]

    def held_outside(self, keep: Sequence[int | bool], offload: Collection[int]) -> list[int]:
        """The values that are in the store, or packed, when backward begins."""
        return self._away(keep, offload, self._forward_ends(keep)[1])

    def holders(
        self,
        keep: Sequence[int | bool],
        released: Iterable[int],
        at: PeakAt,
        written_before: Mapping[int, int] | None = None,
        prefetch_after: Mapping[int, int] | None = None,
    ) -> list[int]:
        """The values that are alive at the fullest moment of that op or ask, largest first."""
        problem = self.problem
        ends, wanted_until = self._forward_ends(keep)
        away = self._away(keep, written_before or (), wanted_until)
        self._departures(away, ends, 0, written_before)
        if at.phase == "forward":
            alive = [int(v) for v in self._made if problem.producer[v] <= at.index <= ends[v]]
        else:
            backward = Backward(problem, keep, frozenset(released), wanted_until, None, away, prefetch_after or {})
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
        self, away: list[int], ends: list[int], limit_bytes: int, written_before: Mapping[int, int] | None
    ) -> OffloadTimes:
        """When they leave; `ends` is changed accordingly."""
        if not away:
            return OffloadTimes({}, {}, 0.0)
        for v in away:
            ends[v] = self.problem.natural_end[v]
        live = self._forward_live(ends, away)
        left = offload_times(
            self.problem, sorted(away), live.tolist(), limit_bytes=limit_bytes, written_before=written_before
        )
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
            codec_cost = problem.codec_cost[v]
            if codec_cost is not None:  # from the moment it is made; packing takes some memory itself, for a moment
                work = codec_cost.workspace_bytes(problem.nbytes[v])
                change[problem.producer[v] + 1] += problem.residual_bytes(v) + work
                change[min(problem.producer[v] + 2, n + 1)] -= work
        np.add.at(change, self._makers, self._sizes)
        np.subtract.at(change, np.minimum(np.array(ends, dtype=np.int64)[self._made], n) + 1, self._sizes)
        live: Bytes = np.cumsum(change[:n]) + self._forward_other
        return live


def _peak(forward_live: Bytes, unpack_live: Bytes) -> tuple[int, PeakAt]:
    phases: list[tuple[str, Any]] = [("forward", forward_live), ("unpack", unpack_live)]
    found = [(int(live.max()), PeakAt(phase, int(live.argmax()))) for phase, live in phases if len(live)]
    return max(found, key=lambda peak: peak[0], default=(0, PeakAt("forward", 0)))
