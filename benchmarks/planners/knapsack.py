"""Knapsack planning, as compilers' partitioners do it."""

from __future__ import annotations

from lowtide.planning import knapsack
from lowtide.planning.candidate import Candidate, judge_decisions
from lowtide.planning.simulator import Simulator

_NOMINAL_BUDGETS = 64
"""Number of nominal budgets, from 0 to twice the budget. Doubled: twice the time, slightly faster plans."""


def solve_knapsack(simulator: Simulator, budget_bytes: int) -> Candidate | None:
    """Return the fastest knapsack plan that fits; None if no nominal budget gives one.

    `knapsack` counts the bytes of saved values only, not those of values that are alive while others are recomputed.
    Its peak may be above or below the budget that it gets, so several nominal budgets are tried.
    """
    best: Candidate | None = None
    for k in range(_NOMINAL_BUDGETS + 1):
        keep = knapsack(simulator.problem, 2 * budget_bytes * k // _NOMINAL_BUDGETS)
        candidate = judge_decisions(simulator, keep, solver="knapsack")
        fits = candidate is not None and candidate.peak_bytes <= budget_bytes
        if candidate is not None and fits and (best is None or candidate.extra_s < best.extra_s):
            best = candidate
    return best
