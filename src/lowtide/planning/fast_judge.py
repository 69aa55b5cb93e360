"""The fast judge: time and peak of a plan and nothing else, for searches that look at thousands of plans.

It follows the rules of `backward` and gives the same numbers as `Simulator` (a test compares them), many times as fast.
Plans in a search differ little, so results are cached: of forward by the set of kept ops, and of each unpack by the
part of the state that it depends on. A plan is given up as soon as it is worse than the caller accepts. This is early,
because a lower bound on its time is known from the start.

The fast judge knows no offloading. The simulator judges every plan again before a search returns it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .bit_layout import BitLayout
from .candidate import max_replays
from .forward_results import ForwardResults
from .problem import Problem
from .unpack_results import UnpackResult, UnpackSimulator

_CACHE_SIZE = 16
"""Results in the cache of each unpack. Doubled: annealing takes the same time within 2 %."""


class FastResult(NamedTuple):
    """Time and bytes of a plan."""

    extra_s: float
    peak_bytes: int
    excess_bytes: int
    """Bytes above the budget: at the peak of forward, and at every unpack, in total."""


class FastJudge:
    """Judges decisions for one problem without offloading."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layout = BitLayout(problem)
        self._forward_results = ForwardResults(self._layout)
        self._unpack_simulator = UnpackSimulator(self._layout)
        # By unpack: its cache, the result used last first.
        self._unpack_results = [[UnpackResult.never_valid(self._layout)] for _ in range(problem.n_unpacks)]
        self._max_replays = max_replays(problem.n_ops)

    @property
    def simulated_replays(self) -> int:
        """Replays that were simulated so far, without those from the cache: a measure of the work done."""
        return self._unpack_simulator.simulated_replays

    def judge(
        self,
        keep: int,
        released: int,
        budget_bytes: int,
        *,
        penalty_s_per_byte: float = 0.0,
        limit_s: float = math.inf,
    ) -> FastResult | None:
        """Return time and bytes of a plan.

        `keep` and `released` are sets of ops (`bits`) as the engine executes them: `keep` is effective, and released
        ops are recomputed. The result is None if the extra time plus `penalty_s_per_byte` for each excess byte is
        above `limit_s`, or if there are too many replays (`max_replays`).
        """
        layout = self._layout
        forward = self._forward_results.of(keep)
        extra_s = forward.min_extra_s
        if extra_s > limit_s:
            return None
        peak = self._forward_results.peak_bytes(forward)
        excess = max(0, peak - budget_bytes)
        if extra_s + penalty_s_per_byte * excess > limit_s:
            return None
        state = forward.state | released << layout.released
        live = forward.live_bytes
        replays = 0
        for k, cache in enumerate(self._unpack_results):
            depends_on, state_before, changed, unpack_peak, live_change, repeats_s, unpack_replays = cache[0]
            if (state ^ state_before) & depends_on:
                spare_s = limit_s - extra_s - penalty_s_per_byte * excess
                result = self._unpack(k, state, spare_s, self._max_replays - replays)
                if result is None:
                    return None
                _, _, changed, unpack_peak, live_change, repeats_s, unpack_replays = result
            if unpack_replays:
                replays += unpack_replays
                extra_s += repeats_s
                if replays > self._max_replays or extra_s + penalty_s_per_byte * excess > limit_s:
                    return None
            unpack_peak += live
            if unpack_peak > peak:
                peak = unpack_peak
            if unpack_peak > budget_bytes:
                excess += unpack_peak - budget_bytes
                if extra_s + penalty_s_per_byte * excess > limit_s:
                    return None
            live += live_change
            state ^= changed
        return FastResult(extra_s, peak, excess)

    def _unpack(self, k: int, state: int, limit_s: float, max_replays: int) -> UnpackResult | None:
        """Return the result of unpack k, from the cache if it has one for this state."""
        cache = self._unpack_results[k]
        for index, result in enumerate(cache):
            if not (state ^ result.state_before) & result.depends_on:
                del cache[index]
                break
        else:
            simulated = self._unpack_simulator.run(k, state, limit_s=limit_s, max_replays=max_replays)
            if simulated is None:
                return None
            result = simulated
            del cache[_CACHE_SIZE - 1 :]
        cache.insert(0, result)
        return result
