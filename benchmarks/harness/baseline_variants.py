"""Baselines executed by lowtide's engine: simple schedules, rotor's schedules, DTR's eviction heuristic."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import lowtide
from lowtide.engine.memory.eviction import Heuristic
from lowtide.engine.runtime import current_runtime
from lowtide.fitting.make_plan import MARGIN
from lowtide.planning import BASELINES, Problem, Simulator, lower_bound, solve
from lowtide.planning.candidate import Candidate, judge_decisions

from ..planners.rotor import solve_rotor
from .base import NotApplicableError
from .lowtide_variants import UNLIMITED, BudgetedPlan, FittedVariant, Online
from .steps import Bench, Forward

H_DTR = Heuristic(wait="since use", unsaved_share=1.0)
_BOUND_S = 4.0


class Dtr(Online):
    """`lowtide.budget` with the eviction heuristic h-DTR (Kirisame et al., 2021), without stores and codecs.

    h-DTR uses the time since the last use instead of the estimated time until the unpack, and has no preference for
    values that autograd did not save.
    """

    family = "h-DTR"
    options: ClassVar[dict[str, Any]] = {"stores": None, "codecs": None}

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        pool = current_runtime().memory().pool
        before, pool.heuristic = pool.heuristic, H_DTR
        self.note = "h-DTR's eviction heuristic in lowtide's engine"
        try:
            with super().applied(bench) as forward:
                yield forward
        finally:
            pool.heuristic = before


class Schedule(FittedVariant):
    """Decisions of `lowtide.planning.BASELINES[name]`, which take no budget."""

    family = "schedules"

    def __init__(self, name: str, schedule: str) -> None:
        super().__init__(name)
        self.schedule = schedule

    def prepare(self, bench: Bench) -> None:
        bench.reset()
        other_bytes = bench.other_bytes
        simulator = Simulator(Problem(bench.trace().without_copies()))
        chosen = judge_decisions(simulator, BASELINES[self.schedule](simulator.problem), solver=self.schedule)
        if chosen is None:
            raise NotApplicableError("this schedule replays too many ops")
        self._adopt(plan_of(simulator.problem, chosen, chosen.peak_bytes), other_bytes, None)


class Rotor(BudgetedPlan):
    """The fastest schedule of `benchmarks.planners.rotor` within the budget, on the profiled step.

    Like lowtide's plans, the schedule leaves 1/200 of the budget free where possible.
    """

    family = "rotor"

    def _plan_for_limit(self, bench: Bench) -> lowtide.Plan:
        problem, limit = Problem(bench.trace().without_copies()), self._limit_bytes
        simulator = Simulator(problem)
        chosen = solve_rotor(simulator, limit - limit // MARGIN) or solve_rotor(simulator, limit)
        if chosen is None:
            raise NotApplicableError("rotor finds no blocks in a row, or no schedule that fits")
        self.note = "rotor's schedule in lowtide's engine"
        if chosen.released:
            self.note += f"; {len(chosen.released)} ops are replayed more often than rotor would"
        return plan_of(problem, chosen, limit)


def plan_of(problem: Problem, chosen: Candidate, budget_bytes: int) -> lowtide.Plan:
    """Return the decisions of a baseline as a plan for the engine."""
    simulation = chosen.simulation
    bound = lower_bound(problem, budget_bytes, deadline=time.monotonic() + _BOUND_S)
    return replace(
        solve(problem.trace, UNLIMITED),
        keep=chosen.keep,
        released=tuple(sorted(chosen.released)),
        budget_bytes=budget_bytes,
        predicted_peak_bytes=simulation.peak_bytes,
        predicted_step_s=simulation.step_s,
        bound_step_s=min(simulation.step_s, bound.step_s),
        solver=chosen.solver,
        replayed_ops=simulation.replayed_ops,
        modules=(),
    )
