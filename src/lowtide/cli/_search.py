"""Find a plan for a budget, or the largest batch or the longest sequences that have one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._errors import BudgetError
from .._units import format_bytes
from ..fitting.longest import longest_of
from ..fitting.planner import Planner
from ..planning import Plan, plan_or_name_budget
from ..records import Trace
from ..reporting.longest_size import LongestSize
from ..reporting.report import Report
from ._model_source import ModelSource
from ._options import Outputs
from ._output import write_file
from ._progress import ProgressReporter

MAX_BATCH = 2**16
"""Largest batch that is tried."""

log = logging.getLogger("lowtide")


@dataclass(frozen=True)
class Attempt:
    """A batch size, and whether it fits. Field names are JSON keys."""

    batch: int
    fits: bool
    peak_bytes: int | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class FitResult:
    """A plan that fits. A search for the largest batch sets `batch` and `attempts`, one for lengths sets `longest`."""

    plan: Plan
    report: Report
    batch: int | None = None
    attempts: tuple[Attempt, ...] = ()
    longest: LongestSize | None = None

    def to_json(self) -> str:
        """Return the plan as read by `Plan.load`. After a search, return its result, with the plan."""
        if self.longest is not None:
            return self.longest.to_json()
        if self.batch is None:
            return self.plan.to_json()
        document: dict[str, Any] = {
            "format": "lowtide largest batch",
            "fits": True,
            "batch": self.batch,
            "budget_bytes": self.plan.budget_bytes,
            "tried": [vars(attempt) for attempt in self.attempts],
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(document)

    def write_reports(self, outputs: Outputs) -> None:
        """Write the requested HTML report and plot."""
        if outputs.html is not None:
            write_file(outputs.html, self.report.save_html)
        if outputs.png is not None:
            write_file(outputs.png, self.report.save_png)


def find_plan(source: ModelSource, budget: int, planner: Planner, progress: ProgressReporter) -> FitResult:
    """Return a plan within `budget` bytes. Raise `BudgetError`, with the smallest budget that works, if none fits."""
    return _solve_or_name_budget(source, budget, planner, progress, source.batch)


def find_largest_batch(source: ModelSource, budget: int, planner: Planner, progress: ProgressReporter) -> FitResult:
    """Return the largest batch that has a plan, found by doubling and bisection.

    Each batch is profiled within the budget, so that the search never needs more memory. A batch whose profiled
    step does not fit counts as too large.
    """
    attempts: list[Attempt] = []
    best: FitResult | None = None

    def fits(batch: int) -> bool:
        nonlocal best
        try:
            found = _solve(source.trace_within(progress, budget, batch), budget, planner, progress)
        except BudgetError as error:
            log.info("batch %d does not fit: %s", batch, error)
            attempts.append(Attempt(batch, fits=False))
            progress.message(f"batch {batch} does not fit")
            return False
        attempts.append(Attempt(batch, True, found.plan.predicted_peak_bytes, found.plan.predicted_step_s))
        progress.message(f"batch {batch} fits: {format_bytes(found.plan.predicted_peak_bytes)}")
        best = found
        return True

    largest = search_largest(fits, source.batch or 1)
    if best is None:
        # Profile one sample without the limit: a plan may fit all the same, and if not, the error names the
        # smallest budget.
        best = _solve_or_name_budget(source, budget, planner, progress, 1)
        largest = 1
    return FitResult(best.plan, best.report, largest, tuple(attempts))


def find_longest(
    source: ModelSource, lengths: range, budget: int, planner: Planner, progress: ProgressReporter
) -> FitResult:
    """Return the longest sequences that have a plan. Raise `BudgetError` if the shortest ones have none."""

    def say(length: int, state: str) -> None:
        progress.start_phase(f"planning: length {length} {state}")

    found = longest_of(source.step_maker(progress), lengths, budget, planner, say)
    return FitResult(found.plan, found.details(), longest=found)


def search_largest(fits: Callable[[int], bool], start: int, limit: int = MAX_BATCH) -> int:
    """Return the largest number up to `limit` that fits, or 0. Assumes that every smaller number fits too."""
    low, high = 0, min(start, limit)
    while fits(high):
        low = high
        if high == limit:
            return limit
        high = min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def describe(source: ModelSource, result: FitResult) -> str:
    """Return the result in one or two sentences, or as a table of lengths."""
    if result.longest is not None:
        rows = f", batch {source.batch}" if source.batch else ""
        return f"{source.name}{rows}{_state(source)}\n\n{result.longest.table('length')}"
    plan = result.plan
    overhead = 100 * (plan.predicted_step_s / plan.plain_step_s - 1) if plan.plain_step_s > 0 else 0.0
    cost = f"with {overhead:.1f} % more time" if plan.recomputed or plan.offload else "with everything kept"
    batch = result.batch or source.batch
    sentence = (
        f"fits: {source.name}{f', batch {batch}' if batch else ''}, peaks at "
        f"{format_bytes(plan.predicted_peak_bytes)} of {format_bytes(plan.budget_bytes)} {cost}{_state(source)}."
    )
    if result.batch is None:
        return sentence
    beyond = "larger batches were not tried" if result.batch == MAX_BATCH else "no larger batch fits"
    attempts = sorted(result.attempts, key=lambda attempt: attempt.batch)
    return f"{sentence}\n{beyond}; tried: {', '.join(map(_describe_attempt, attempts))}"


def _state(source: ModelSource) -> str:
    return "" if source.optimizer == "none" else f", including the {source.optimizer} state"


def _describe_attempt(attempt: Attempt) -> str:
    peak = format_bytes(attempt.peak_bytes) if attempt.peak_bytes is not None else "does not fit"
    return f"{attempt.batch} ({peak})"


def _solve_or_name_budget(
    source: ModelSource, budget: int, planner: Planner, progress: ProgressReporter, batch: int | None
) -> FitResult:
    def make_plan(limit: int) -> FitResult:
        return _solve(source.trace(progress, limit=limit, batch=batch), limit, planner, progress)

    return plan_or_name_budget(make_plan, budget)


def _solve(trace: Trace, budget: int, planner: Planner, progress: ProgressReporter) -> FitResult:
    progress.start_phase("planning")
    plan = planner.solve(trace, budget, progress.message)
    return FitResult(plan, Report.of(trace, plan))
