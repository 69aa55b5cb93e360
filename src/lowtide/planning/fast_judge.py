"""The judge in a hurry: bytes and time of a plan, and nothing else, for searches that look at thousands of plans.

It follows the same rules as `Simulator` and comes to the same numbers (a test compares them), many times as fast: from
plan to plan little changes, so how forward ends is remembered by what is kept, and how an ask is answered by what that
depended on. And it gives a plan up as soon as that is worse than the caller would accept, which is soon, since what is
made again at least once is known from the beginning.
It knows no stores and no packing. Whatever is found with it is judged by the simulator before it is handed on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .bit_layout import BitLayout
from .candidate import most_replays
from .forward_results import ForwardResults
from .problem import Problem
from .unpack_results import UnpackJudge, UnpackResult

_MOST_ANSWERS = 16
"""Answers that are remembered of each ask."""


class FastResult(NamedTuple):
    """What a plan takes and needs."""

    extra_s: float
    peak_bytes: int
    excess_bytes: int
    """Bytes above the budget: the most of forward, and of every ask, added up."""


class FastJudge:
    """Judges decisions for one problem whose values are all kept in memory or recomputed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layout = BitLayout(problem)
        self._beginnings = ForwardResults(self._layout)
        self._answering = UnpackJudge(self._layout)
        # By ask, those that applied last first.
        self._answers = [[UnpackResult.of_no_state(self._layout)] for _ in range(problem.n_unpacks)]
        self._most_replays = most_replays(problem.n_ops)

    def judge(
        self,
        keep: int,
        released: int,
        budget_bytes: int,
        *,
        price_s: float = 0.0,
        limit_s: float = math.inf,
    ) -> FastResult | None:
        """Follow the decisions: the set of ops that are kept, as the engine obeys it, and of recomputed ops whose
        values are released after use (`bits`).

        None as soon as the extra time, with `price_s` for each byte too many, is above `limit_s`; or if there are more
        replays than anybody would want.
        """
        layout = self._layout
        begins = self._beginnings.of(keep)
        extra = begins.least_s
        if extra > limit_s:
            return None
        peak = self._beginnings.peak_bytes(begins)
        excess = max(0, peak - budget_bytes)
        if extra + price_s * excess > limit_s:
            return None
        state = begins.state | released << layout.away
        live = begins.live_bytes
        replays = 0
        for k, known in enumerate(self._answers):
            looked_at, before, changed, most, more, replay_s, times = known[0]
            if (state ^ before) & looked_at:
                answer = self._answer(k, state, limit_s - extra - price_s * excess, self._most_replays - replays)
                if answer is None:
                    return None
                _, _, changed, most, more, replay_s, times = answer
            if times:
                replays += times
                extra += replay_s
                if replays > self._most_replays or extra + price_s * excess > limit_s:
                    return None
            most += live
            if most > peak:
                peak = most
            if most > budget_bytes:
                excess += most - budget_bytes
                if extra + price_s * excess > limit_s:
                    return None
            live += more
            state ^= changed
        return FastResult(extra, peak, excess)

    def _answer(self, k: int, state: int, most_s: float, most_replays: int) -> UnpackResult | None:
        """As it was answered before, or else anew."""
        known = self._answers[k]
        for place, answer in enumerate(known):
            if not (state ^ answer.before) & answer.looked_at:
                del known[place]
                break
        else:
            found = self._answering.answer(k, state, most_s=most_s, most_replays=most_replays)
            if found is None:
                return None
            answer = found
            del known[_MOST_ANSWERS - 1 :]
        known.insert(0, answer)
        return answer
