"""The simulator: follows decisions through one step and computes live bytes and time.

It is the only judge of plans: every solver and every baseline calls it. It models the engine (Rules 4 to 6). In
forward, a kept value is held from its production on, an offloaded value leaves memory when it is written, and each
value is freed when nothing needs it any more. Backward follows the rules B1 to B12 of `backward`. Temporaries inside a
replayed op are not modelled.
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
from .backward import Backward, BackwardListener
from .offload import OffloadTimes, offload_times
from .prefetch import choose_prefetches
from .problem import Problem

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PeakAt:
    """The place of a peak: a forward op or an unpack of backward."""

    phase: str
    """"forward" or "unpack"."""
    index: int


@dataclass(frozen=True, eq=False)
class Simulation:
    """Live bytes and time of one simulated step."""

    peak_bytes: int
    peak_at: PeakAt
    forward_live: Bytes
    """By op: live bytes while it runs."""
    unpack_live: Bytes
    """By unpack: the most live bytes from this unpack to the next."""
    extra_s: float
    """Time beyond that of the plain step."""
    step_s: float
    replayed_ops: int
    replays: tuple[int, ...]
    """By op: number of replays."""
    written_before: Mapping[int, int] = field(default_factory=dict)
    """By offloaded op: the op before which its outputs are written or compressed."""
    prefetch_after: Mapping[int, int] = field(default_factory=dict)
    """By prefetched op: the op after whose first fetch its prefetch starts, or `WHEN_BACKWARD_BEGINS`."""
    store_wait_s: float = 0.0
    """Part of `extra_s`: waiting for the store, compression and decompression."""


def simulate(
    trace: Trace,
    keep: Sequence[int | bool],
    released: Iterable[int] = (),
    written_before: Mapping[int, int] | None = None,
    link: Link | None = None,
    codec_costs: Sequence[CodecCost] = (),
    prefetch_after: Mapping[int, int] | None = None,
) -> Simulation:
    """Simulate one set of decisions. To simulate many for one trace, use one `Simulator`."""
    return Simulator(Problem(trace, link, codec_costs)).run(
        keep, released, offload=written_before or (), written_before=written_before, prefetch_after=prefetch_after or {}
    )


class Simulator:
    """Simulates decisions for one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        trace = problem.trace
        produced = np.array([v for v in range(problem.n_values) if problem.producer[v] >= 0], dtype=np.int64)
        self._produced = produced
        self._nbytes = np.array(problem.nbytes, dtype=np.int64)[produced]
        self._producers = np.array(problem.producer, dtype=np.int64)[produced]
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
        listener: BackwardListener | None = None,
    ) -> Simulation:
        """Simulate forward and backward, in O(ops + unpacks + replays).

        `released` are recomputed ops whose outputs are released after use, `offload` are kept ops that are offloaded.
        Forward waits for writes where `written_before` says so; if it is None, where more than `limit_bytes` would
        be live. Values are prefetched as `prefetch_after` says; if it is None, where this saves time and at most
        `limit_bytes` are live. Raises `ArgumentError` for invalid decisions, and `TooManyReplaysError` after
        `max_replays` replays.
        """
        released_ops = frozenset(released)
        self.problem.check_decisions(keep, released_ops, offload)
        keep = self.problem.effective_decisions(keep)
        released_ops = frozenset(j for j in released_ops if not keep[j])
        ends, needed_until = self._lifetimes(keep)
        offloaded = self._offloaded_values(keep, offload, needed_until)
        times = self._offload(offloaded, ends, limit_bytes, written_before)
        forward_live = self._forward_live(ends, offloaded)

        def run_backward(prefetches: Mapping[int, int], listener: BackwardListener | None = None) -> Backward:
            backward = Backward(self.problem, keep, released_ops, needed_until, max_replays, offloaded, prefetches)
            backward.listener = listener
            backward.run()
            return backward

        if listener is not None and times.wait_s:
            listener.waited(times.wait_s)
        backward = run_backward(prefetch_after or {}, listener)
        if prefetch_after is None:
            last_live = int(forward_live[-1]) if len(forward_live) else 0
            prefetches = choose_prefetches(
                self.problem, offloaded, backward.fetches, last_live_bytes=last_live, limit_bytes=limit_bytes
            )
            if prefetches:
                backward = min(backward, run_backward(prefetches), key=lambda one: one.extra_s)
        # Bytes allocated before the first unpack count as live during the last op of forward, as in a profile.
        forward_live[-1:] += backward.first_prefetch_bytes
        unpack_live = np.array(backward.unpack_peaks, dtype=np.int64) + self._unpack_other  # B12
        peak_bytes, peak_at = _peak(forward_live, unpack_live)
        extra_s = times.wait_s + backward.extra_s + self.problem.trace.copying_s
        return Simulation(
            peak_bytes=peak_bytes,
            peak_at=peak_at,
            forward_live=forward_live,
            unpack_live=unpack_live,
            extra_s=extra_s,
            step_s=self.problem.trace.step_s + extra_s,
            replayed_ops=backward.replayed_ops,
            replays=tuple(backward.replays),
            written_before=times.written_before,
            prefetch_after=dict(backward.prefetch_after),
            store_wait_s=times.wait_s + backward.store_wait_s,
        )

    def forward_ends(self, keep: Sequence[int | bool], written_before: Mapping[int, int] | None = None) -> list[int]:
        """Return by value the last forward op during which it is alive; the number of ops or more: into backward."""
        ends, needed_until = self._lifetimes(keep)
        self._offload(self._offloaded_values(keep, written_before or (), needed_until), ends, 0, written_before)
        return ends

    def held_into_backward(self, keep: Sequence[int | bool], offload: Collection[int] = ()) -> list[int]:
        """Return the values that lowtide holds in memory when backward begins (B2)."""
        problem = self.problem
        _, needed_until = self._lifetimes(keep)
        needed = [int(v) for v in self._produced if needed_until[v] >= problem.n_ops]
        offloaded = frozenset(self._offloaded_values(keep, offload, needed_until))
        return [v for v in needed if keep[problem.producer[v]] and v not in offloaded]

    def offloaded_into_backward(self, keep: Sequence[int | bool], offload: Collection[int]) -> list[int]:
        """Return the values that are in the store or compressed when backward begins."""
        return self._offloaded_values(keep, offload, self._lifetimes(keep)[1])

    def holders(
        self,
        keep: Sequence[int | bool],
        released: Iterable[int],
        at: PeakAt,
        written_before: Mapping[int, int] | None = None,
        prefetch_after: Mapping[int, int] | None = None,
    ) -> list[int]:
        """Return the values that are alive at the peak of an op or unpack, largest first."""
        problem = self.problem
        ends, needed_until = self._lifetimes(keep)
        offloaded = self._offloaded_values(keep, written_before or (), needed_until)
        self._offload(offloaded, ends, 0, written_before)
        if at.phase == "forward":
            alive = [int(v) for v in self._produced if problem.producer[v] <= at.index <= ends[v]]
        else:
            prefetches = prefetch_after or {}
            backward = Backward(problem, keep, frozenset(released), needed_until, None, offloaded, prefetches)
            backward.begin()
            for k in range(at.index):
                backward.unpack(k)
            backward.record_peak_values = True
            backward.unpack(at.index)
            alive = backward.peak_values
        return sorted(alive, key=lambda v: (-problem.nbytes[v], v))

    def _offloaded_values(
        self, keep: Sequence[int | bool], offload: Collection[int], needed_until: list[int]
    ) -> list[int]:
        """Return the outputs of the offloaded ops that leave memory and that backward needs."""
        problem = self.problem
        return [v for j in offload if keep[j] for v in problem.offloaded_outputs(j) if needed_until[v] >= problem.n_ops]

    def _offload(
        self, offloaded: list[int], ends: list[int], limit_bytes: int, written_before: Mapping[int, int] | None
    ) -> OffloadTimes:
        """Simulate the writes of forward, and set the `ends` of the offloaded values."""
        if not offloaded:
            return OffloadTimes({}, {}, 0.0)
        for v in offloaded:
            ends[v] = self.problem.natural_end[v]
        live = self._forward_live(ends, offloaded)
        times = offload_times(
            self.problem, sorted(offloaded), live.tolist(), limit_bytes=limit_bytes, written_before=written_before
        )
        for v, end in times.ends.items():
            ends[v] = end
        return times

    def _lifetimes(self, keep: Sequence[int | bool]) -> tuple[list[int], list[int]]:
        """Return by value the last op during which it is alive, and the last one for which it has a user (B1).

        In forward, a recipe exists as long as one of its outputs is alive or has a user. The number of ops stands for
        "into backward", which only handles reach.
        """
        problem = self.problem
        n = problem.n_ops
        needed_until = [n if saved else -1 for saved in problem.saved]
        ends = list(problem.natural_end)
        recipe_end = self._recipe_end
        inputs, outputs = problem.inputs, problem.outputs
        for j in range(n - 1, -1, -1):
            if keep[j]:
                for v in outputs[j]:
                    if needed_until[v] > ends[v]:
                        ends[v] = needed_until[v]
            else:
                end = -1
                for v in outputs[j]:
                    end = max(end, recipe_end[v], needed_until[v])
                for v in inputs[j]:
                    if end > needed_until[v]:
                        needed_until[v] = end
        return ends, needed_until

    def _forward_live(self, ends: list[int], offloaded: Sequence[int] = ()) -> Bytes:
        problem, n = self.problem, self.problem.n_ops
        change = np.zeros(n + 2, dtype=np.int64)
        for v in offloaded:
            codec_cost = problem.codec_cost[v]
            if codec_cost is not None:  # compressed before the op after its producer, which counts the workspace
                scratch_bytes = codec_cost.workspace_bytes(problem.nbytes[v])
                change[problem.producer[v] + 1] += problem.residual_bytes(v) + scratch_bytes
                change[min(problem.producer[v] + 2, n + 1)] -= scratch_bytes
        np.add.at(change, self._producers, self._nbytes)
        np.subtract.at(change, np.minimum(np.array(ends, dtype=np.int64)[self._produced], n) + 1, self._nbytes)
        live: Bytes = np.cumsum(change[:n]) + self._forward_other
        return live


def _peak(forward_live: Bytes, unpack_live: Bytes) -> tuple[int, PeakAt]:
    phases: list[tuple[str, Any]] = [("forward", forward_live), ("unpack", unpack_live)]
    found = [(int(live.max()), PeakAt(phase, int(live.argmax()))) for phase, live in phases if len(live)]
    return max(found, key=lambda peak: peak[0], default=(0, PeakAt("forward", 0)))
