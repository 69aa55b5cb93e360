"""Variants of lowtide: rules, the online budget and plans."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

import lowtide
from lowtide.codecs.costs import codec_costs_for
from lowtide.engine.runtime import current_runtime
from lowtide.fitting import registry
from lowtide.fitting.fitted_model import FittedModel
from lowtide.fitting.make_plan import MARGIN, link_to
from lowtide.planning import solve

from .base import BudgetResult, NotApplicableError, Variant
from .peers import SAVED_BY_SAC
from .steps import Bench, Forward

SMALLEST, HALF = "smallest", "half"
NOT_FOLLOWED = "the plan was not followed in every step"
_MEASURED_STEPS, _RECORDED_STEPS = 2, 6
UNLIMITED = 2**62


def limit_bytes(bench: Bench, limit: str) -> int:
    """Return the budget in bytes, without other tensors of the process.

    `limit` is a percentage of plain's peak ("60"), "half" (parameters, buffers and batch, and half of the rest of
    plain's peak), "smallest" (the smallest budget with a plan), or the name of another variant (its peak).
    """
    if limit.isdigit():
        return bench.peaks["plain"] * int(limit) // 100
    if limit == HALF:
        return (bench.base_bytes + bench.peaks["plain"]) // 2
    if limit == SMALLEST:
        if bench.smallest_bytes is None:
            bench.smallest_bytes = _smallest_bytes(bench) - bench.other_bytes
        return bench.smallest_bytes
    if limit not in bench.peaks:
        raise NotApplicableError(f"no variant {limit!r} has been measured in this run: its peak is unknown")
    return bench.peaks[limit]


def _smallest_bytes(bench: Bench) -> int:
    try:
        solve(bench.trace(), 1, codec_costs=codec_costs_for(bench.trace(), "exact"))
    except lowtide.BudgetError as error:
        if error.smallest_bytes is None:
            raise
        return error.smallest_bytes
    raise AssertionError("found a plan for a budget of one byte")


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
    "products": lambda: lowtide.SaveOps(SAVED_BY_SAC),
}


class Online(Variant):
    """`with lowtide.budget(limit):` around the forward pass."""

    family = "lowtide online"
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, name: str, limit: str) -> None:
        super().__init__(name)
        self.limit = limit

    def prepare(self, bench: Bench) -> None:
        self._asked_bytes = limit_bytes(bench, self.limit)
        self.budget_result = BudgetResult(self._asked_bytes)

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        assert self.budget_result is not None
        other_bytes = bench.other_bytes

        def forward() -> torch.Tensor:
            with lowtide.budget(f"{self._asked_bytes + other_bytes} B", **self.options):
                return bench.loss()

        yield forward
        memory_budget = lowtide.report().budget
        if memory_budget is not None:
            self.budget_result.own_peak_bytes = max(
                memory_budget.peak_bytes - other_bytes, self.budget_result.own_peak_bytes or 0
            )


def _changes_steps(plan: lowtide.Plan) -> bool:
    return bool(plan.recomputed or plan.offload)


class FittedVariant(Variant):
    """A plan from `prepare`, executed through `lowtide.fit(model, plan=plan)`.

    The fitted state is reused in all rounds, as in training. The periodic scan of all live tensors takes at most 0.5 %
    of the time in training. Between steps of other variants it would be due in nearly every timed step, so `applied`
    runs the scan before the step.
    """

    @property
    def settling_steps(self) -> int:
        """lowtide measures two steps, and stops recording steps that keep everything after six."""
        needed = _MEASURED_STEPS if self._plan is not None and _changes_steps(self._plan) else _RECORDED_STEPS
        return max(0, needed - (self._fitted.steps if self._fitted is not None else 0))

    stores: ClassVar[tuple[str, ...]] = ("device",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._plan: lowtide.Plan | None = None
        self._fitted: FittedModel | None = None

    def _adopt(self, plan: lowtide.Plan, other_bytes: int, asked: int | None) -> None:
        self._plan = plan
        self.budget_result = BudgetResult(
            asked_bytes=asked,
            predicted_bytes=plan.predicted_peak_bytes - other_bytes,
            predicted_extra_s=plan.predicted_step_s - plan.plain_step_s,
            predicted_plain_s=plan.plain_step_s,
            bound_extra_s=plan.bound_step_s - plan.plain_step_s,
            solver=plan.solver,
        )

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        assert self._plan is not None
        assert self.budget_result is not None
        other_bytes = bench.other_bytes
        asked = self.budget_result.asked_bytes
        # Other tensors of the process may have changed by some bytes since planning.
        limit = UNLIMITED if asked is None else max(asked + other_bytes, self._plan.predicted_peak_bytes)
        if self._fitted is None:
            lowtide.fit(bench.model, plan=self._plan, budget=f"{limit} B", stores=self.stores)
            self._fitted = registry.state_of(bench.model)
        else:
            self._fitted.limit_bytes = limit
            registry.add(bench.model, self._fitted)
        try:
            current_runtime().memory().recount()
            yield bench.loss
            report = lowtide.report(bench.model)
            if report.measured_peak_bytes is not None:
                own = report.measured_peak_bytes - other_bytes
                self.budget_result.own_peak_bytes = max(own, self.budget_result.own_peak_bytes or 0)
            if report.online_steps or report.plan is not self._plan:
                self.note = f"{self.note}; {NOT_FOLLOWED}".lstrip("; ") if NOT_FOLLOWED not in self.note else self.note
        finally:
            lowtide.unfit(bench.model)

    def finish(self, bench: Bench) -> None:
        self._plan = self._fitted = None


class BudgetedPlan(FittedVariant):
    """A plan for one budget."""

    def __init__(self, name: str, limit: str) -> None:
        super().__init__(name)
        self.limit = limit

    def prepare(self, bench: Bench) -> None:
        asked, other_bytes = limit_bytes(bench, self.limit), bench.other_bytes
        self.budget_result = BudgetResult(asked)
        self._limit_bytes = asked + other_bytes
        bench.reset()
        plan = self._plan_for_limit(bench)
        self._adopt(plan, other_bytes, self._limit_bytes - other_bytes)

    @abstractmethod
    def _plan_for_limit(self, bench: Bench) -> lowtide.Plan:
        """Return a plan for `_limit_bytes`; raise `NotApplicableError` if none exists."""


class Planned(BudgetedPlan):
    """The plan of `lowtide.plan(model, batch, budget)`; all budgets share one profile."""

    family = "lowtide planned"

    def _plan_for_limit(self, bench: Bench) -> lowtide.Plan:
        limit = self._limit_bytes
        trace, link = bench.trace(), link_to(current_runtime().store(self.stores))
        codec_costs = codec_costs_for(trace, "exact")  # the default of `fit`
        try:
            return solve(trace, limit, link=link, codec_costs=codec_costs, leave_free_bytes=limit // MARGIN)
        except lowtide.BudgetError as error:
            if self.limit != SMALLEST:
                raise NotApplicableError(str(error).partition(": ")[2].partition(" (")[0]) from error
            # Other tensors of the process have changed by some bytes.
            self._limit_bytes = error.smallest_bytes or 0
            return solve(trace, self._limit_bytes, link=link, codec_costs=codec_costs)


class PlannedWithDisk(Planned):
    """`Planned` with `stores=("disk",)`: values may be offloaded to a temporary file."""

    family = "lowtide planned, disk"
    stores = ("disk",)
