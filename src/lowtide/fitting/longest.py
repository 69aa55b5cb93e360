"""`longest`: the longest size of a step that fits into a budget, found by bisection over plans.

Only small sizes are profiled (see `sized_steps`). They fit into the budget, so the search does not exceed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from .._errors import BudgetError
from .._units import parse_budget
from ..engine.runtime import current_runtime
from ..planning import Plan, plan_or_name_budget
from ..planning.predict import Predictor
from ..records import Trace
from ..reporting.longest_size import LongestSize, SizePrediction
from ..stores import Store
from .make_plan import link_to
from .planner import Planner
from .profile_step import Loss, generators_restored, step_maker
from .sized_steps import SizedSteps, SizeRange, StepMaker

_SCALED_MARGIN = 200
"""A plan for a size that was not profiled leaves 1/200 of the budget free. Doubled: half the margin."""
_SMALLER_ROWS = 6
"""Predictions for sizes below the longest one. Doubled: a longer table."""


def longest(
    model: nn.Module,
    batch: Callable[[int], Any],
    budget: str | int,
    sizes: SizeRange,
    *,
    loss: Loss | None = None,
    stores: str | Store | Sequence[str | Store] | None = ("device",),
    codecs: str | Sequence[str] | None = "exact",
    verify: bool = True,
    deadline_s: float = 20.0,
) -> LongestSize:
    """Return the longest of `sizes` whose steps fit into `budget`, with a plan. The model is not trained.

    `batch(size)` returns a batch of a size, such as one of sequences with `size` tokens. `sizes` is the smallest and
    the largest size, or a range, such as `range(64, 1025, 64)` if only multiples of 64 are of interest. Small sizes
    are profiled, which needs little memory; batches of other sizes are built, but not run. The other arguments are as
    for `plan`.

    The step must run the same ops at all sizes, and need more memory at larger ones. Raises `BudgetError` if the
    smallest size does not fit.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> found = lowtide.longest(model, lambda n: torch.randn(n, 8), "64 MiB", (64, 512), loss=lambda out: out.mean())
    >>> found.size
    512
    """
    planner = Planner(deadline_s, link_to(current_runtime().store(stores)), codecs)
    with generators_restored():
        return longest_of(step_maker(model, batch, loss, verify), sizes, parse_budget(budget), planner)


def longest_of(
    maker: StepMaker,
    sizes: SizeRange,
    limit_bytes: int,
    planner: Planner,
    progress: Callable[[int, str], None] | None = None,
) -> LongestSize:
    """Return the longest size that fits. `progress` is called with sizes and what is known about them."""
    return _Search(SizedSteps(maker, sizes), limit_bytes, planner, progress or (lambda size, state: None)).run()


class _Search:
    """The search for the longest size."""

    def __init__(
        self, steps: SizedSteps, limit_bytes: int, planner: Planner, progress: Callable[[int, str], None]
    ) -> None:
        self._steps = steps
        self._limit_bytes = limit_bytes
        self._planner = planner
        self._progress = progress
        self._fits: dict[int, bool] = {}
        """By size: whether it has a plan."""
        self._plans: dict[int, Plan] = {}

    def run(self) -> LongestSize:
        """Return the longest size that fits. Raises `BudgetError` if the smallest one does not."""
        steps, limit_bytes = self._steps, self._limit_bytes
        smallest, largest = steps.sizes[0], steps.sizes[-1]
        self._plans[smallest] = plan_or_name_budget(self._plan_smallest, limit_bytes)
        self._fits = {smallest: True}
        steps.profile_larger(largest, limit_bytes)
        longest = self._bisect()
        while steps.is_uncertain(longest, limit_bytes) and steps.profile_larger(longest, limit_bytes):
            self._fits = {smallest: True}
            longest = self._bisect()
        while (plan := self._plan(longest)) is None:  # the planner has reached its time limit
            self._fits[longest] = False
            longest = self._bisect()
        at_longest = steps.at(longest)
        return LongestSize(
            size=longest,
            budget_bytes=limit_bytes,
            plan=plan,
            predictions=(*self._smaller(longest), _prediction(longest, plan), *self._larger(longest)),
            profiled=steps.profiled,
            uncertain_bytes=at_longest.uncertain_bytes,
            trace=at_longest.trace,
        )

    def _plan_smallest(self, limit_bytes: int) -> Plan:
        self._steps.profile_smallest(limit_bytes)
        return self._planner.solve(self._steps.at(self._steps.sizes[0]).trace, limit_bytes)

    def _bisect(self) -> int:
        """Return the longest size that fits. All smaller sizes are assumed to fit too."""
        sizes = self._steps.sizes
        if self._is_feasible(sizes[-1]):
            return sizes[-1]
        low, high = 0, len(sizes) - 1
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_feasible(sizes[middle]):
                low = middle
            else:
                high = middle
        return sizes[low]

    def _is_feasible(self, size: int) -> bool:
        if size not in self._fits:
            self._fits[size] = self._planner.is_feasible(self._steps.at(size).trace, self._limit_of(size))
            self._progress(size, "fits" if self._fits[size] else "does not fit")
        return self._fits[size]

    def _plan(self, size: int) -> Plan | None:
        """Return the plan for a size, or None if none is found."""
        if size in self._plans:
            return self._plans[size]
        self._progress(size, "in detail")
        try:
            plan = self._planner.solve(self._steps.at(size).trace, self._limit_of(size))
        except BudgetError:
            return None
        self._plans[size] = replace(plan, budget_bytes=self._limit_bytes)
        return self._plans[size]

    def _limit_of(self, size: int) -> int:
        margin_bytes = 0 if size in self._steps.profiled else self._limit_bytes // _SCALED_MARGIN
        return self._limit_bytes - margin_bytes

    def _smaller(self, longest: int) -> Iterator[SizePrediction]:
        """Yield the predictions for some smaller sizes, from the smallest on, each about twice as long as the last."""
        sizes: list[int] = []
        for size in self._steps.sizes:
            if size >= longest:
                break
            if not sizes or size >= 2 * sizes[-1]:
                sizes.append(size)
        for size in sizes[:: max(1, -(-len(sizes) // _SMALLER_ROWS))]:
            if (plan := self._plan(size)) is not None:
                yield _prediction(size, plan)

    def _larger(self, longest: int) -> Iterator[SizePrediction]:
        """Yield the prediction for the next size, which does not fit, unless the longest is the last one."""
        sizes = self._steps.sizes
        for size in sizes[sizes.index(longest) + 1 :][:1]:
            yield SizePrediction(size, _plain_peak_bytes(self._steps.at(size).trace))


def _prediction(size: int, plan: Plan) -> SizePrediction:
    overhead = plan.predicted_step_s / plan.plain_step_s - 1 if plan.plain_step_s else 0.0
    return SizePrediction(size, plan.plain_peak_bytes, plan.predicted_peak_bytes, plan.predicted_step_s, overhead)


def _plain_peak_bytes(trace: Trace) -> int:
    return Predictor(trace).plain.peak_bytes if trace.is_single_pass else trace.peak_bytes
