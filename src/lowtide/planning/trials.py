"""The judge in a hurry: bytes and time of a plan, and nothing else, for searches that look at thousands of plans.

It follows the same rules as `Simulator` and comes to the same numbers (a test compares them), many times as fast: from
plan to plan little changes, so how forward ends is remembered by what is kept, and how an ask is answered by what that
depended on. And it gives a plan up as soon as that is worse than the caller would accept, which is soon, since what is
made again at least once is known from the beginning.
It knows no stores and no packing. Whatever is found with it is judged by the simulator before it is handed on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import NamedTuple

from .answering import Answer, Answering
from .beginnings import Beginnings
from .bits import Weights, members_of
from .candidate import most_replays
from .layout import Layout
from .problem import Problem

_NO_TURNS: Mapping[int, int] = {}
_MOST_ANSWERS = 16
"""Answers that are remembered of each ask."""


class Trial(NamedTuple):
    """What a plan takes and needs."""

    extra_s: float
    peak_bytes: int
    excess_bytes: int
    """Bytes above the budget: the most of forward, and of every ask, added up."""


class Trials:
    """Judges decisions for one problem whose values are all kept in memory or recomputed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layout = Layout(problem)
        self._beginnings = Beginnings(self._layout)
        self._answering = Answering(self._layout)
        # By ask, those that applied last first.
        self._answers = [[Answer.of_no_state(self._layout)] for _ in range(problem.n_asks)]
        self._nbytes = Weights(self._layout.nbytes)
        self._made_by: dict[int, int] = {}
        self._most_replays = most_replays(problem.n_ops)

    def judge(
        self,
        keep: int,
        again: int,
        budget_bytes: int,
        *,
        turns: Mapping[int, int] = _NO_TURNS,
        price_s: float = 0.0,
        limit_s: float = math.inf,
    ) -> Trial | None:
        """Follow the decisions: the set of ops that are kept, as the engine obeys it, and of those that are recomputed
        more than once (`bits`); `turns`, by ask, are of recomputed ops only.

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
        state = begins.state | again << layout.away
        live = begins.live_bytes
        turning = replays = later = 0
        last: dict[int, int] = {}  # by ask: the ops that do not turn any more
        for k in sorted(turns, reverse=True):
            last[k] = (turns[k] & ~later) << layout.turns_later
            later |= turns[k]
        state |= later << layout.turns_later
        for k, known in enumerate(self._answers):
            if k in last:
                turning ^= turns[k]
                state ^= last[k]
            if turning and layout.asked[k] >= 0 and not keep >> layout.maker[layout.asked[k]] & 1:  # the engine sees it
                state ^= turning << layout.away
                turning &= state >> layout.away
                if turning:  # what they have made goes, unless a handle has been given it
                    gone = self._made(turning) & state & ~layout.given[k]
                    state ^= gone
                    live -= self._nbytes.total(gone)
                    turning = 0
            looked_at, before, changed, most, more, again_s, times = known[0]
            if (state ^ before) & looked_at:
                answer = self._answer(k, state, limit_s - extra - price_s * excess, self._most_replays - replays)
                if answer is None:
                    return None
                _, _, changed, most, more, again_s, times = answer
            if times:
                replays += times
                extra += again_s
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
        return Trial(extra, peak, excess)

    def _answer(self, k: int, state: int, most_s: float, most_replays: int) -> Answer | None:
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

    def _made(self, ops: int) -> int:
        """The values that these ops make."""
        found = self._made_by.get(ops)
        if found is None:
            found = self._made_by[ops] = reduce(or_, [self._layout.made_bits[op] for op in members_of(ops)])
        return found
