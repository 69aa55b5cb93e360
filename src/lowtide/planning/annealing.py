"""Plans changed at random, a few decisions at a time, also for the worse at first: simulated annealing.

For budgets at which what was found is far above the bound, as it is near the smallest: there ops have to be made again
more than once, which the programme cannot say. On the way there may be too many bytes, because from one plan that fits
to the next there is often no other way; they have a price, which rises while there are too many and falls while there
are not, so that the search stays where plans begin to fit. It forgets where it began: several short searches find
better plans than a long one, as plans that are alike in cost may have little else in common.

What comes out fits, and is not slower than what went in; it is not said how much better it could be. The changes are
always the same; how many of them there are depends on the time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from .bits import bits_of, members_of, where
from .candidate import Candidate, judged
from .moves import Decisions, Moves
from .simulator import Simulator
from .trials import Trial, Trials
from .turns import as_bits, from_bits

_NAME = ", annealed"
_TRIALS_A_GROUP = 40
"""Plans that a search looks at, for each group of ops that is decided; if it goes on from a plan, twice as many."""
_SEARCHES_ALIKE = 3
"""After so many searches that begin anew the next ones are longer: how long is best differs from step to step."""
_COLD = 0.001
_MOST_PRICE, _RISE = 3000.0, 1.01
"""The price of bytes rises to that at most, and by that from trial to trial."""
_A_TURN = 1e-4
"""What an op that turns costs, as a share of a plain step, lest turns pile up that gain nothing."""


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
    enough: Callable[[Candidate, int], bool] | None = None,
) -> Candidate:
    """The best plan that was found; `start` if that is none that fits, or fits and is faster than `start`.

    `enough` is asked before each search from the beginning, with the best plan and how many there were; without it
    there are as many as there is time for.
    """
    moves = Moves(simulator.problem, budget_bytes, start.offload)
    if not moves.groups:
        return start
    judge = _Judge(simulator, budget_bytes, start)
    draw = random.Random(0)
    best, searches = start, 0

    def decided(candidate: Candidate) -> Decisions:
        return Decisions(where(candidate.keep), bits_of(candidate.again), as_bits(candidate.turns))

    def search(decisions: Decisions, manner: _Manner, trials: int, until: float) -> None:
        nonlocal best
        found = _search(judge, moves, decisions, manner, trials, draw, until)
        other = None if found is None else judge.candidate(found)
        if other is not None and (best.peak_bytes > budget_bytes or other.extra_s < best.extra_s):
            best = other

    trials = _TRIALS_A_GROUP * len(moves.groups)
    plain = Decisions(where(simulator.problem.keep_all()), 0)

    def soon() -> float:
        """A third of the time that is left."""
        return time.monotonic() + (deadline - time.monotonic()) / 3

    # From the plan there is first: where there are many ops, there is no time to begin anew.
    search(decided(best), _FROM_A_PLAN, 2 * trials, soon())
    search(decided(best), _FAR_FROM_IT, 2 * trials, 2 * soon() - time.monotonic())
    began = time.monotonic()
    search(decided(best), _NEAR_A_PLAN, 2 * trials, deadline)
    search_s = (time.monotonic() - began) / 2
    while deadline - time.monotonic() > 3 * search_s and not (enough and enough(best, searches)):
        began = time.monotonic()
        search(plain.copy(), _ANEW, trials * (1 + searches // _SEARCHES_ALIKE), deadline)
        search_s = time.monotonic() - began
        searches += 1
    if searches:
        search(decided(best), _NEAR_A_PLAN, 2 * trials, deadline)
    if best.turns and best is not start:
        best = judge.candidate(_tidied(judge, decided(best))) or best
    return best


def _tidied(judge: _Judge, decisions: Decisions) -> Decisions:
    """Without turns that gain nothing, of which a search leaves many behind."""
    now = judge(decisions)
    for op in members_of(decisions.turning()):
        asks = from_bits(decisions.turns)[op]
        fewer = [(asks[:i] + asks[i + 2 :], decisions.again) for i in range(len(asks) - 1)]
        for turns, again in (((), decisions.again), ((), decisions.again ^ 1 << op), *fewer):
            other = Decisions(decisions.keep, again, as_bits(from_bits(decisions.turns) | {op: turns}))
            then = judge(other)
            if now is not None and then is not None and not then.excess_bytes and then.extra_s <= now.extra_s:
                decisions, now = other, then
                break
    return decisions


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
    began = time.monotonic()
    gone, done = 0.0, 0
    while gone < 1:
        if done % 16 == 0:
            # By the number of trials, so that it is always the same; by the clock where there is no time for them.
            gone = max(done / trials, (time.monotonic() - began) / max(deadline - began, 1e-9))
            warmth_s = step_s * manner.warmth * (_COLD / manner.warmth) ** gone
        done += 1
        price = min(price * _RISE, _MOST_PRICE) if now.excess_bytes else max(price / _RISE, manner.least_price)
        price_s = price * step_s / judge.budget_bytes
        other = here.copy()
        moves.change(other, draw)
        # What is accepted is drawn first: then most of the others need not be followed to the end.
        limit_s = now.extra_s + price_s * now.excess_bytes - warmth_s * math.log(1 - draw.random())
        limit_s -= _A_TURN * step_s * (other.n_turns() - here.n_turns())
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
        self._trials = Trials(simulator.problem)

    def __call__(self, decisions: Decisions, price_s: float = 0.0, limit_s: float = math.inf) -> Trial | None:
        decisions.obey(self.simulator.problem)
        if not self._offload:
            return self._trials.judge(
                decisions.keep,
                decisions.again,
                self.budget_bytes,
                turns=decisions.turns,
                price_s=price_s,
                limit_s=limit_s,
            )
        candidate = self.candidate(decisions)
        if candidate is None:
            return None
        found = candidate.simulation
        over = [(live - self.budget_bytes).clip(min=0) for live in (found.forward_live, found.ask_live)]
        excess = int(over[0].max(initial=0) + over[1].sum())
        trial = Trial(found.extra_s, found.peak_bytes, excess)
        return trial if trial.extra_s + price_s * excess <= limit_s else None

    def candidate(self, decisions: Decisions) -> Candidate | None:
        """The judge's own word."""
        return judged(
            self.simulator,
            [bool(decisions.keep >> j & 1) for j in range(self.simulator.problem.n_ops)],
            frozenset(members_of(decisions.again)),
            turns=from_bits(decisions.turns),
            offload=self._offload,
            room_bytes=self.budget_bytes,
            solver=self._solver,
        )
