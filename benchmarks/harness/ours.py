"""lowtide's ways: rules, the online budget, plans, and schedules of others obeyed by lowtide's engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

import lowtide
from lowtide._plan import profile
from lowtide.planning import BASELINES, Problem, Simulator, lower_bound, solve

from .contract import Budgeted, NotApplicableError, Variant
from .peers import KEPT_BY_SAC
from .steps import Bench, Forward, step

SMALLEST, HALF = "smallest", "half"
NOT_FOLLOWED = "the plan was not followed in every step"
_STEPS_TO_A_PLAN = 3  # profiled, then two that lowtide measures
_STEPS_MEASURED, _STEPS_TO_TRUST = 2, 6
_ASKED_AGAIN = 2
_UNLIMITED = 2**62


def asked_bytes(bench: Bench, rung: str) -> int:
    """A rung of the ladder in bytes, without what lives beside the model: "60" % of plain's peak, what is there anyway
    and "half" of what plain adds to it, the "smallest" budget that the planner finds a plan for, or the peak of another
    variant, by its name."""
    if rung.isdigit():
        return bench.peaks["plain"] * int(rung) // 100
    if rung == HALF:
        return (bench.base_bytes + bench.peaks["plain"]) // 2
    if rung == SMALLEST:
        if bench.smallest_bytes is None:
            bench.smallest_bytes = _smallest(bench) - bench.other_bytes
        return bench.smallest_bytes
    if rung not in bench.peaks:
        raise NotApplicableError(f"there is no peak of {rung!r} to plan for in this run")
    return bench.peaks[rung]


def _smallest(bench: Bench) -> int:
    bench.reset()
    try:
        lowtide.plan(bench.model, bench.batch, 1)
    except lowtide.BudgetError as error:
        if error.smallest_bytes is None:
            raise
        return error.smallest_bytes
    raise AssertionError("a plan for one byte")


class Rule(Variant):
    """`with lowtide.saving(rule):` around the forward pass."""

    family = "lowtide rules"

    def __init__(self, name: str, rule: Callable[[], lowtide.Policy]) -> None:
        super().__init__(name)
        self.rule = rule

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        def forward() -> torch.Tensor:
            with lowtide.saving(self.rule()):
                return bench.loss()

        yield forward


RULES: dict[str, Callable[[], lowtide.Policy]] = {
    "every1": lambda: lowtide.EveryN(1),
    "products": lambda: lowtide.SaveOps(KEPT_BY_SAC),
}


class Online(Variant):
    """`with lowtide.budget(limit):` around the forward pass, with default settings; nothing is planned."""

    family = "lowtide online"

    def __init__(self, name: str, rung: str) -> None:
        super().__init__(name)
        self.rung = rung

    def prepare(self, bench: Bench) -> None:
        self._asked_bytes = asked_bytes(bench, self.rung)
        self.budgeted = Budgeted(self._asked_bytes)

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        assert self.budgeted is not None
        other_bytes = bench.other_bytes

        def forward() -> torch.Tensor:
            with lowtide.budget(self._asked_bytes + other_bytes):
                return bench.loss()

        yield forward
        room = lowtide.report().budget
        if room is not None:
            self.budgeted.own_peak_bytes = max(room.peak_bytes - other_bytes, self.budgeted.own_peak_bytes or 0)


class Obeyed(Variant):
    """A plan, made in `prepare`, obeyed through `lowtide.fit(model, plan=plan)`."""

    @property
    def settling_steps(self) -> int:
        """lowtide measures two steps, and leaves those alone that keep everything once it has seen a few."""
        return _STEPS_MEASURED if self._plan is not None and self._plan.recomputed else _STEPS_TO_TRUST

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._plan: lowtide.Plan | None = None

    def _adopt(self, plan: lowtide.Plan, other_bytes: int, asked: int | None) -> None:
        self._plan = plan
        self.budgeted = Budgeted(
            asked_bytes=asked,
            predicted_bytes=plan.predicted_peak_bytes - other_bytes,
            predicted_extra_s=plan.predicted_step_s - plan.plain_step_s,
            bound_extra_s=plan.bound_step_s - plan.plain_step_s,
            solver=plan.solver,
        )

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        assert self._plan is not None
        assert self.budgeted is not None
        other_bytes = bench.other_bytes
        asked = self.budgeted.asked_bytes
        # What others hold may have changed by some bytes since the plan was made, and is not the model's business.
        limit = _UNLIMITED if asked is None else max(asked + other_bytes, self._plan.predicted_peak_bytes)
        lowtide.fit(bench.model, plan=self._plan, budget=limit)
        try:
            yield bench.loss
            report = lowtide.report(bench.model)
            if report.measured_peak_bytes is not None:
                own = report.measured_peak_bytes - other_bytes
                self.budgeted.own_peak_bytes = max(own, self.budgeted.own_peak_bytes or 0)
            if report.online_steps or report.plan is not self._plan:
                self.note = f"{self.note}; {NOT_FOLLOWED}".lstrip("; ") if NOT_FOLLOWED not in self.note else self.note
        finally:
            lowtide.unfit(bench.model)

    def finish(self, bench: Bench) -> None:
        self._plan = None


class Planned(Obeyed):
    """`lowtide.fit(model, budget=...)`: the plan that it makes after its first step, obeyed from then on.

    The smallest budget is asked of `lowtide.plan`, which may profile outside of it.
    """

    family = "lowtide planned"

    def __init__(self, name: str, rung: str) -> None:
        super().__init__(name)
        self.rung = rung

    def prepare(self, bench: Bench) -> None:
        asked, other_bytes = asked_bytes(bench, self.rung), bench.other_bytes
        self.budgeted = Budgeted(asked)
        self._limit_bytes = asked + other_bytes
        bench.reset()
        plan = self._smallest_plan(bench) if self.rung == SMALLEST else self._plan_of_fit(bench)
        if plan is None:
            raise NotApplicableError("no plan fits: the model trains under the online budget")
        self._adopt(plan, other_bytes, self._limit_bytes - other_bytes)

    def _smallest_plan(self, bench: Bench) -> lowtide.Plan:
        """For the budget that lowtide named, or, where it then names a larger one, for that."""
        for _ in range(_ASKED_AGAIN):
            try:
                return lowtide.plan(bench.model, bench.batch, self._limit_bytes)
            except lowtide.BudgetError as error:
                self._limit_bytes = max(self._limit_bytes, error.smallest_bytes or 0)
                self.note = "the smallest budget that was named first could not be met"
        return lowtide.plan(bench.model, bench.batch, self._limit_bytes)

    def _plan_of_fit(self, bench: Bench) -> lowtide.Plan | None:
        lowtide.fit(bench.model, budget=self._limit_bytes)
        try:
            for _ in range(_STEPS_TO_A_PLAN):
                bench.reset()
                step(bench.loss)
            return lowtide.report(bench.model).plan
        finally:
            lowtide.unfit(bench.model)


class Schedule(Obeyed):
    """Decisions of `lowtide.planning.BASELINES[name]`, which look at no budget, obeyed by lowtide's engine."""

    family = "schedules"

    def __init__(self, name: str, schedule: str) -> None:
        super().__init__(name)
        self.schedule = schedule

    def prepare(self, bench: Bench) -> None:
        bench.reset()
        other_bytes = bench.other_bytes
        trace = profile(bench.model, bench.batch)
        simulator = Simulator(Problem(trace))
        keep = tuple(BASELINES[self.schedule](simulator.problem))
        judged = simulator.run(keep)
        plan = replace(
            solve(trace, _UNLIMITED),
            keep=keep,
            budget_bytes=judged.peak_bytes,
            predicted_peak_bytes=judged.peak_bytes,
            predicted_step_s=judged.step_s,
            bound_step_s=min(judged.step_s, lower_bound(simulator.problem, judged.peak_bytes).step_s),
            solver=self.schedule,
            replayed_ops=judged.replayed_ops,
            kinds=(),
        )
        self._adopt(plan, other_bytes, None)
