"""Choices of others, followed by lowtide's engine: simple schemes, rotor's schedules, DTR's heuristic."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import lowtide
from lowtide.engine.memory.eviction import Heuristic
from lowtide.engine.runtime import current_runtime
from lowtide.planning import BASELINES, Problem, Simulator, lower_bound, solve
from lowtide.planning.candidate import Candidate, judged

from ..planners.rotor import solve_rotor
from .contract import NotApplicableError
from .ours import CAUTION, UNLIMITED, Obeyed, Online, WithinRung
from .steps import Bench, Forward

H_DTR = Heuristic(wait="since use", unsaved_share=1.0)
_BOUND_S = 4.0


class Dtr(Online):
    """The same budget with the choices of h-DTR (Kirisame et al., 2021), by dropping and replaying alone.

    The heuristic is DTR's, its engine is lowtide's: staleness in place of the wait until backward asks, and no
    preference for values that autograd did not save.
    """

    family = "h-DTR"
    options: ClassVar[dict[str, Any]] = {"stores": None, "codecs": None}

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        pool = current_runtime().memory().pool
        before, pool.heuristic = pool.heuristic, H_DTR
        self.note = "h-DTR's choice of what to drop, in lowtide's engine"
        try:
            with super().applied(bench) as forward:
                yield forward
        finally:
            pool.heuristic = before


class Schedule(Obeyed):
    """Decisions of `lowtide.planning.BASELINES[name]`, which look at no budget, obeyed by lowtide's engine."""

    family = "schedules"

    def __init__(self, name: str, schedule: str) -> None:
        super().__init__(name)
        self.schedule = schedule

    def prepare(self, bench: Bench) -> None:
        bench.reset()
        other_bytes = bench.other_bytes
        simulator = Simulator(Problem(bench.trace().without_copies()))
        chosen = judged(simulator, BASELINES[self.schedule](simulator.problem), solver=self.schedule)
        if chosen is None:
            raise NotApplicableError("this schedule replays too much to be followed")
        self._adopt(plan_of(simulator.problem, chosen, chosen.peak_bytes), other_bytes, None)


class Rotor(WithinRung):
    """The quickest schedule of `benchmarks.planners.rotor` within the budget, obeyed by lowtide's engine.

    Beaumont et al. (2019) on the profiled step; like lowtide's plans it leaves 1/200 of the budget free where it can.
    What of rotor's schedules the engine follows to the letter is said in `benchmarks/planners/rotor.py`.
    """

    family = "rotor"

    def _made_plan(self, bench: Bench) -> lowtide.Plan:
        problem, limit = Problem(bench.trace().without_copies()), self._limit_bytes
        simulator = Simulator(problem)
        chosen = solve_rotor(simulator, limit - limit // CAUTION) or solve_rotor(simulator, limit)
        if chosen is None:
            raise NotApplicableError("rotor finds no blocks in a row here, or no schedule of them that fits")
        self.note = "rotor's schedule of blocks, obeyed by lowtide's engine"
        if chosen.released:
            self.note += f"; {len(chosen.released)} ops are replayed more often than rotor would"
        return plan_of(problem, chosen, limit)


def plan_of(problem: Problem, chosen: Candidate, budget_bytes: int) -> lowtide.Plan:
    """Decisions that `solve` did not make, in the shape in which the engine reads them."""
    judgement = chosen.simulation
    bound = lower_bound(problem, budget_bytes, deadline=time.monotonic() + _BOUND_S)
    return replace(
        solve(problem.trace, UNLIMITED),
        keep=chosen.keep,
        released=tuple(sorted(chosen.released)),
        budget_bytes=budget_bytes,
        predicted_peak_bytes=judgement.peak_bytes,
        predicted_step_s=judgement.step_s,
        bound_step_s=min(judgement.step_s, bound.step_s),
        solver=chosen.solver,
        replayed_ops=judgement.replayed_ops,
        modules=(),
    )
