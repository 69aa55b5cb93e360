"""Simulated annealing: random small changes of a plan, accepted at first even if the plan gets worse.

It runs for budgets at which the best plan so far is far above the lower bound, as it is near the smallest budget. Plans
there recompute some ops more than once, which the MILP cannot express. Plans on the way may exceed the budget, because
often no other path leads from one plan that fits to the next. Excess bytes have a price, in seconds per byte. It rises
while the current plan exceeds the budget and falls while it does not, so that the search stays near plans that just
fit. Several short searches find better plans than a long one: plans of similar cost may have little in common.

The result fits, if the start does, and is not slower than the start. Searches end after a fixed amount of work, so the
result is deterministic.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from .bits import bits_of, bits_where, members_of
from .candidate import Candidate, judge_decisions
from .fast_judge import FastJudge, FastResult
from .moves import Decisions, Moves
from .simulator import Simulator

_SUFFIX = ", annealed"
_MOVES_PER_GROUP = 40
"""Moves of a search from keeping everything, for each group of ops; twice as many from a plan. Doubled: twice the
time, up to `max_moves`."""
_MOVES_PER_SIMULATION = 30
"""Moves of the fast judge that take about as long as one simulation."""
_UNPACKS_PER_MOVE = 300
"""Unpacks in a step of which one move takes usual work. Doubled: twice the time for long steps."""
_REPLAYS_PER_MOVE = 50
"""Simulated replays that take about as long as the rest of a move. Doubled: more moves on plans with many replays."""
_FINAL_TEMPERATURE = 0.001
"""Temperature at the end of a search, as a share of a plain step."""
_MAX_PRICE, _PRICE_STEP = 3000.0, 1.01
"""Upper limit on the price of excess bytes, and the factor by which it rises or falls with each move."""


@dataclass(frozen=True)
class _Settings:
    """Settings of one search, as shares of a plain step."""

    temperature: float
    """Mean extra time of an accepted change, at the start."""
    price: float
    """Price of as many excess bytes as the budget has, at the start."""
    min_price: float


_FROM_KEEP_ALL = _Settings(0.1, 1.0, 0.1)
_NEAR_FEASIBLE = _Settings(0.02, 100.0, 10.0)  # near the smallest budgets few plans fit: excess bytes are expensive
_FAR = _Settings(0.02, 1.0, 0.1)
_LOCAL = _Settings(0.01, 100.0, 10.0)


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

    Three searches start from the best plan, then `searches` from keeping everything, then one from the best plan. Each
    has at most `max_moves` moves, less if a move takes more work than usual. `deadline` is a safety net.
    """
    moves = Moves(simulator.problem, budget_bytes, start.offload)
    if not moves.groups:
        return start
    judge = _Judge(simulator, budget_bytes, start)
    rng = random.Random(0)
    best = start

    def search(decisions: Decisions, settings: _Settings, n_moves: int) -> None:
        nonlocal best
        found = _search(judge, moves, decisions, settings, min(n_moves, max_moves), rng, deadline)
        candidate = None if found is None else judge.to_candidate(found)
        if candidate is not None and (best.peak_bytes > budget_bytes or candidate.extra_s < best.extra_s):
            best = candidate

    n_moves = _MOVES_PER_GROUP * len(moves.groups)
    keep_all = Decisions(bits_where(simulator.problem.keep_all()), 0)
    for settings in (_NEAR_FEASIBLE, _FAR, _LOCAL):
        search(_decisions_of(best), settings, 2 * n_moves)
    for _ in range(searches):
        search(keep_all.copy(), _FROM_KEEP_ALL, n_moves)
    if searches:
        search(_decisions_of(best), _LOCAL, 2 * n_moves)
    return best


def _decisions_of(candidate: Candidate) -> Decisions:
    return Decisions(bits_where(candidate.keep), bits_of(candidate.released))


def _search(
    judge: _Judge,
    moves: Moves,
    current: Decisions,
    settings: _Settings,
    n_moves: int,
    rng: random.Random,
    deadline: float,
) -> Decisions | None:
    """Run one search, which takes as much work as `n_moves` moves. Return the fastest decisions that fit, or None."""
    step_s = judge.simulator.problem.trace.step_s
    result = judge(current)
    if result is None:  # too many replays
        return None
    best, best_s = (current, result.extra_s) if not result.excess_bytes else (None, math.inf)
    price = settings.price
    progress, done, work_before = 0.0, 0, judge.work
    while progress < 1:
        if done % 16 == 0:
            progress = (judge.work - work_before) / n_moves
            if time.monotonic() > deadline:
                break
            temperature_s = step_s * settings.temperature * (_FINAL_TEMPERATURE / settings.temperature) ** progress
        done += 1
        price = (
            min(price * _PRICE_STEP, _MAX_PRICE)
            if result.excess_bytes
            else max(price / _PRICE_STEP, settings.min_price)
        )
        penalty_s_per_byte = price * step_s / judge.budget_bytes
        changed = current.copy()
        moves.change(changed, rng)
        # The limit of acceptance is drawn before the plan is judged, so that the judge can give up most plans early.
        cost_s = result.extra_s + penalty_s_per_byte * result.excess_bytes
        limit_s = cost_s - temperature_s * math.log(1 - rng.random())
        accepted = judge(changed, penalty_s_per_byte, limit_s)
        if accepted is None:
            continue
        current, result = changed, accepted
        if not result.excess_bytes and result.extra_s < best_s:
            best, best_s = current, result.extra_s
    return best


class _Judge:
    """Judges decisions: with the fast judge, or with the simulator if ops are offloaded."""

    def __init__(self, simulator: Simulator, budget_bytes: int, start: Candidate) -> None:
        self.simulator = simulator
        self.budget_bytes = budget_bytes
        self._offload = start.offload
        self._solver = f"{start.solver.removesuffix(_SUFFIX)}{_SUFFIX}"
        self._fast_judge = FastJudge(simulator.problem)
        self._judged = 0

    @property
    def work(self) -> float:
        """Work done so far, in moves of usual work."""
        if self._offload:
            return self._judged * _MOVES_PER_SIMULATION
        moves = self._judged * max(1.0, self.simulator.problem.n_unpacks / _UNPACKS_PER_MOVE)
        return moves + self._fast_judge.simulated_replays / _REPLAYS_PER_MOVE

    def __call__(
        self, decisions: Decisions, penalty_s_per_byte: float = 0.0, limit_s: float = math.inf
    ) -> FastResult | None:
        """Make the decisions effective and return their result, or None if it is above `limit_s`."""
        decisions.make_effective(self.simulator.problem)
        self._judged += 1
        if not self._offload:
            return self._fast_judge.judge(
                decisions.keep,
                decisions.released,
                self.budget_bytes,
                penalty_s_per_byte=penalty_s_per_byte,
                limit_s=limit_s,
            )
        candidate = self.to_candidate(decisions)
        if candidate is None:
            return None
        simulation = candidate.simulation
        forward_excess, unpack_excess = (
            (live - self.budget_bytes).clip(min=0) for live in (simulation.forward_live, simulation.unpack_live)
        )
        excess = int(forward_excess.max(initial=0) + unpack_excess.sum())
        result = FastResult(simulation.extra_s, simulation.peak_bytes, excess)
        return result if result.extra_s + penalty_s_per_byte * excess <= limit_s else None

    def to_candidate(self, decisions: Decisions) -> Candidate | None:
        """Return the decisions with their simulation, or None if they replay too much."""
        return judge_decisions(
            self.simulator,
            [bool(decisions.keep >> j & 1) for j in range(self.simulator.problem.n_ops)],
            frozenset(members_of(decisions.released)),
            offload=self._offload,
            limit_bytes=self.budget_bytes,
            solver=self._solver,
        )
