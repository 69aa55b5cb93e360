"""Better lower bounds for a plan that is there: how much faster could another one be?

The places where a plan is full say most about what others cannot do either, so a bound that is proved beside a plan is
better than one from nothing. With minutes instead of moments `prove` finds out what planning had no time for.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from ..trace import Trace
from .bounds import Bound, lower_bound
from .candidate import Candidate
from .plan import Plan
from .problem import Problem
from .simulator import Simulator
from .turns import from_plan

_WORTH_PROVING = 0.005
"""Share of a plain step above the bound from which on a better one is worth a moment."""


def proved(
    simulator: Simulator,
    budget_bytes: int,
    bound: Bound,
    best: Candidate,
    seconds: float,
    *,
    whole: bool = False,
) -> Bound:
    """A better bound, where one is worth it: how much better than the best so far could a plan be?"""
    plain_s = simulator.problem.trace.step_s
    if bound.impossible or best.simulation.step_s - bound.step_s <= _WORTH_PROVING * plain_s:
        return bound
    deadline, ask_live = time.monotonic() + seconds, best.simulation.ask_live
    better = lower_bound(simulator.problem, budget_bytes, deadline=deadline, ask_live=ask_live, whole=whole)
    return replace(better, step_s=max(bound.step_s, better.step_s))


def also_without_copies(
    untouched: Simulator, bound: Bound, best: Candidate, budget_bytes: int, seconds: float
) -> Bound:
    """A bound for plans that make no copies either: they have more to hold, for most of backward."""
    without = lower_bound(untouched.problem, budget_bytes, deadline=time.monotonic() + seconds)
    if without.step_s < bound.step_s:
        without = proved(untouched, budget_bytes, without, best, seconds, whole=True)
    return bound if without.impossible else replace(bound, step_s=min(bound.step_s, without.step_s))


def prove(trace: Trace, plan: Plan, *, seconds: float, leave_free_bytes: int = 0) -> float:
    """The time of a step below which no plan for this plan's budget is, as far as that can be proved in the time.

    It may take twice as long where gradients may be copied, or not. `trace` is the one that the plan was solved for,
    `leave_free_bytes` what it had to leave free.
    """
    least_s = math.inf
    for way in [trace.without_copies(), *([trace] if trace.copies else [])]:
        problem = Problem(way, plan.link, plan.packings)
        simulation = Simulator(problem).run(
            plan.keep,
            plan.again,
            turns=from_plan(problem, plan.turns),
            offload=plan.offload,
            written_by=plan.departures,
            read_after=plan.reads_ahead,
        )
        bound = lower_bound(
            problem,
            plan.budget_bytes - leave_free_bytes,
            deadline=time.monotonic() + seconds,
            ask_live=simulation.ask_live,
            whole=True,
        )
        least_s = min(least_s, math.inf if bound.impossible else bound.step_s)
    return max(plan.bound_step_s, min(least_s, plan.predicted_step_s))
