"""Plans changed at random, a few decisions at a time, also for the worse at first: simulated annealing.

For budgets at which what was found is far above the bound, as it is near the smallest: there ops have to be made again
more than once, which the programme cannot say. On the way there may be too many bytes, because from one plan that fits
to the next there is often no other way; they have a price, which rises while there are too many and falls while there
are not, so that the search stays where plans begin to fit. It forgets where it began: several short searches find
better plans than a long one, as plans that are alike in cost may have little else in common.

The result fits and is not slower than the start. The number of moves is fixed, so the result is deterministic.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from .bits import bits_of, members_of, where
from .candidate import Candidate, judged
from .fast_judge import FastJudge, FastResult
from .moves import Decisions, Moves
from .simulator import Simulator

_NAME = ", annealed"
_TRIALS_A_GROUP = 40
"""Plans that a search looks at, for each group of ops that is decided; if it goes on from a plan, twice as many."""
_SIMULATOR_MOVES = 30
"""Moves of the fast judge that take as long as one of the simulator, about."""
_COLD = 0.001
_MOST_PRICE, _RISE = 3000.0, 1.01
"""The price of bytes rises to that at most, and by that from trial to trial."""


@dataclass(frozen=True)
class _Manner:
    """How to search: shares of a plain step."""

    warmth: float
    """What a change for the worse may cost, more or less, when it begins."""
    price: float
    """What a budget's worth of bytes too many costs when it begins."""
    least_price: float


_ANEW = _Manner(0.1, 1.0, 0.1)
_FROM_A_PLAN = _Manner(0.02, 100.0, 10.0)  # near the smallest budgets few plans fit: do not go far from one
_FAR_FROM_IT = _Manner(0.02, 1.0, 0.1)
_NEAR_A_PLAN = _Manner(0.01, 100.0, 10.0)


def anneal(
    simulator: Simulator,
    start: Candidate,
    budget_bytes: int,
    *,
    deadline: float,
    searches: int = 3,
    max_moves: int = 12_000,
) -> Candidate:
    """Return the fastest plan found that fits, or `start` if none is faster.

    Three coolings start from the best plan, then `searches` from keeping everything, each of at most `max_moves`
    moves. `deadline` is a safety net.
    """
    moves = Moves(simulator.problem, budget_bytes, start.offload)
    if not moves.groups:
        return start
    judge = _Judge(simulator, budget_bytes, start)
    draw = random.Random(0)
    best = start

    def decided(candidate: Candidate) -> Decisions:
        return Decisions(where(candidate.keep), bits_of(candidate.released))

    def search(decisions: Decisions, manner: _Manner, trials: int) -> None:
        nonlocal best
        found = _search(judge, moves, decisions, manner, min(trials, judge.affordable(max_moves)), draw, deadline)
        other = None if found is None else judge.candidate(found)
        if other is not None and (best.peak_bytes > budget_bytes or other.extra_s < best.extra_s):
            best = other

    trials = _TRIALS_A_GROUP * len(moves.groups)
    plain = Decisions(where(simulator.problem.keep_all()), 0)
    for manner in (_FROM_A_PLAN, _FAR_FROM_IT, _NEAR_A_PLAN):
        search(decided(best), manner, 2 * trials)
    for _ in range(searches):
        search(plain.copy(), _ANEW, trials)
    if searches:
        search(decided(best), _NEAR_A_PLAN, 2 * trials)
    return best


def _search(
    judge: _Judge, moves: Moves, here: Decisions, manner: _Manner, trials: int, draw: random.Random, deadline: float
) -> Decisions | None:
    """One cooling down: the quickest decisions that were seen to fit."""
    step_s = judge.simulator.problem.trace.step_s
    now = judge(here)
    if now is None:  # it replays too much
        return None
    best, best_s = (here, now.extra_s) if not now.excess_bytes else (None, math.inf)
    price = manner.price
    gone, done = 0.0, 0
    while gone < 1:
        if done % 16 == 0:
            gone = done / trials
            if time.monotonic() > deadline:
                break
            warmth_s = step_s * manner.warmth * (_COLD / manner.warmth) ** gone
        done += 1
        price = min(price * _RISE, _MOST_PRICE) if now.excess_bytes else max(price / _RISE, manner.least_price)
        price_s = price * step_s / judge.budget_bytes
        other = here.copy()
        moves.change(other, draw)
        # What is accepted is drawn first: then most of the others need not be followed to the end.
        limit_s = now.extra_s + price_s * now.excess_bytes - warmth_s * math.log(1 - draw.random())
        then = judge(other, price_s, limit_s)
        if then is None:
            continue
        here, now = other, then
        if not now.excess_bytes and now.extra_s < best_s:
            best, best_s = here, now.extra_s
    return best


class _Judge:
    """What decisions cost; by the simulator where values wait elsewhere, or else in a hurry."""

    def __init__(self, simulator: Simulator, budget_bytes: int, start: Candidate) -> None:
        self.simulator = simulator
        self.budget_bytes = budget_bytes
        self._offload = start.offload
        self._solver = f"{start.solver.removesuffix(_NAME)}{_NAME}"
        self._trials = FastJudge(simulator.problem)

    def __call__(self, decisions: Decisions, price_s: float = 0.0, limit_s: float = math.inf) -> FastResult | None:
        decisions.obey(self.simulator.problem)
        if not self._offload:
            return self._trials.judge(
                decisions.keep,
                decisions.released,
                self.budget_bytes,
                price_s=price_s,
                limit_s=limit_s,
            )
        candidate = self.candidate(decisions)
        if candidate is None:
            return None
        found = candidate.simulation
        over = [(live - self.budget_bytes).clip(min=0) for live in (found.forward_live, found.unpack_live)]
        excess = int(over[0].max(initial=0) + over[1].sum())
        trial = FastResult(found.extra_s, found.peak_bytes, excess)
        return trial if trial.extra_s + price_s * excess <= limit_s else None

    def affordable(self, moves: int) -> int:
        """Fewer moves where every one is judged by the full simulator."""
        return moves // _SIMULATOR_MOVES if self._offload else moves

    def candidate(self, decisions: Decisions) -> Candidate | None:
        """The judge's own word."""
        return judged(
            self.simulator,
            [bool(decisions.keep >> j & 1) for j in range(self.simulator.problem.n_ops)],
            frozenset(members_of(decisions.released)),
            offload=self._offload,
            limit_bytes=self.budget_bytes,
            solver=self._solver,
        )
