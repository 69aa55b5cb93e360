"""lowtide's ways: rules, the online budget, plans."""

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
from lowtide.fitting.make_plan import CAUTION, link_to
from lowtide.planning import solve
from lowtide.stores.names import resolve

from .contract import Budgeted, NotApplicableError, Variant
from .peers import KEPT_BY_SAC
from .steps import Bench, Forward

SMALLEST, HALF = "smallest", "half"
NOT_FOLLOWED = "the plan was not followed in every step"
_STEPS_MEASURED, _STEPS_TO_TRUST = 2, 6
UNLIMITED = 2**62


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
    try:
        solve(bench.trace(), 1, codec_costs=codec_costs_for(bench.trace(), "exact"))
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
    options: ClassVar[dict[str, Any]] = {}

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
            with lowtide.budget(self._asked_bytes + other_bytes, **self.options):
                return bench.loss()

        yield forward
        memory_budget = lowtide.report().budget
        if memory_budget is not None:
            self.budgeted.own_peak_bytes = max(
                memory_budget.peak_bytes - other_bytes, self.budgeted.own_peak_bytes or 0
            )


def _does_something(plan: lowtide.Plan) -> bool:
    return bool(plan.recomputed or plan.offload)


class Obeyed(Variant):
    """A plan, made in `prepare`, obeyed through `lowtide.fit(model, plan=plan)`.

    What `fit` knows of the model is put aside between rounds, so that lowtide learns once, as it does in training. Now
    and then lowtide looks at all tensors of the process, for at most half a per cent of the time. Between the steps of
    others that would fall due in nearly every step that is timed, so it is done before.
    """

    @property
    def settling_steps(self) -> int:
        """lowtide measures two steps, and leaves those alone that keep everything once it has seen a few."""
        wanted = _STEPS_MEASURED if self._plan is not None and _does_something(self._plan) else _STEPS_TO_TRUST
        return max(0, wanted - (self._fitted.steps if self._fitted is not None else 0))

    stores: ClassVar[tuple[str, ...]] = ("device",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._plan: lowtide.Plan | None = None
        self._fitted: FittedModel | None = None

    def _adopt(self, plan: lowtide.Plan, other_bytes: int, asked: int | None) -> None:
        self._plan = plan
        self.budgeted = Budgeted(
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
        assert self.budgeted is not None
        other_bytes = bench.other_bytes
        asked = self.budgeted.asked_bytes
        # What others hold may have changed by some bytes since the plan was made, and is not the model's business.
        limit = UNLIMITED if asked is None else max(asked + other_bytes, self._plan.predicted_peak_bytes)
        if self._fitted is None:
            lowtide.fit(bench.model, plan=self._plan, budget=limit, stores=self.stores)
            self._fitted = registry.state_of(bench.model)
        else:
            self._fitted.limit_bytes = limit
            registry.enter(bench.model, self._fitted)
        try:
            current_runtime().memory().census()
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
        self._plan = self._fitted = None


class WithinRung(Obeyed):
    """A plan for a rung of the ladder."""

    def __init__(self, name: str, rung: str) -> None:
        super().__init__(name)
        self.rung = rung

    def prepare(self, bench: Bench) -> None:
        asked, other_bytes = asked_bytes(bench, self.rung), bench.other_bytes
        self.budgeted = Budgeted(asked)
        self._limit_bytes = asked + other_bytes
        bench.reset()
        plan = self._made_plan(bench)
        self._adopt(plan, other_bytes, self._limit_bytes - other_bytes)

    @abstractmethod
    def _made_plan(self, bench: Bench) -> lowtide.Plan:
        """For `_limit_bytes`; `NotApplicableError` if there is none."""


class Planned(WithinRung):
    """The plan that `lowtide.plan(model, batch, budget)` makes, obeyed through `lowtide.fit(model, plan=plan)`.

    All budgets are planned from one profile, and 1/200 of each is left free where it can be, as `fit` does. That
    lowtide looks at all tensors of the process now and then, for at most half a per cent of the time, is not in the
    times.
    """

    family = "lowtide planned"

    def _made_plan(self, bench: Bench) -> lowtide.Plan:
        limit = self._limit_bytes
        trace, link = bench.trace(), link_to(resolve(self.stores))
        codec_costs = codec_costs_for(trace, "exact")  # what is allowed if nobody says otherwise
        try:
            return solve(trace, limit, link=link, codec_costs=codec_costs, leave_free_bytes=limit // CAUTION)
        except lowtide.BudgetError as error:
            if self.rung != SMALLEST:
                raise NotApplicableError(str(error).partition(": ")[2].partition(" (")[0]) from error
            # What lives beside the model has changed by some bytes.
            self._limit_bytes = error.smallest_bytes or 0
            return solve(trace, self._limit_bytes, link=link, codec_costs=codec_costs)


class PlannedWithDisk(Planned):
    """The same with `stores=("disk",)`: values may wait in a file in the system's directory for temporary files.

    The processor's time of a step includes that of the threads that write, also where they work beside the step.
    """

    family = "lowtide planned, disk"
    stores = ("disk",)
