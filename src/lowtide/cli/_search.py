"""Does a model fit, with which plan, and with how large a batch?"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._errors import BudgetError
from .._units import format_bytes
from ..codecs.costs import codec_costs_for
from ..planning import Link, Plan, solve
from ..records import Trace
from ..reporting.report import Report
from ._model_choice import Subject
from ._options import Outputs
from ._output import save
from ._progress import Teller

MOST = 2**16
"""The batch beyond which no larger one is looked for."""

log = logging.getLogger("lowtide")


@dataclass(frozen=True)
class Tried:
    """A batch size, and whether it fits."""

    batch: int
    fits: bool
    peak_bytes: int | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class Fits:
    """A plan that works; `batch` and `tried` where the largest batch was looked for."""

    plan: Plan
    report: Report
    batch: int | None = None
    tried: tuple[Tried, ...] = ()

    def to_json(self) -> str:
        """The plan as `Plan.load` reads it; after a search for the largest batch, that and the plan in it."""
        if self.batch is None:
            return self.plan.to_json()
        document: dict[str, Any] = {
            "format": "lowtide largest batch",
            "fits": True,
            "batch": self.batch,
            "budget_bytes": self.plan.budget_bytes,
            "tried": [vars(one) for one in self.tried],
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(document)

    def draw(self, outputs: Outputs) -> None:
        """The page and the picture that were asked for."""
        draw(self.report, outputs)


def draw(report: Report, outputs: Outputs) -> None:
    """Write the page and the picture that were asked for."""
    if outputs.html is not None:
        save(outputs.html, report.save_html)
    if outputs.png is not None:
        save(outputs.png, report.save_png)


@dataclass(frozen=True)
class Search:
    """How plans are looked for: how long, and whether values may wait in a store or be held packed."""

    deadline_s: float
    link: Link | None = None
    codecs: tuple[str, ...] = ()


def fits(subject: Subject, budget: int, search: Search, teller: Teller) -> Fits:
    """The plan, or `BudgetError` with the smallest budget that works."""
    trace = subject.trace(teller, limit=budget)
    return _planned(trace, budget, search, teller)


def largest_batch(subject: Subject, budget: int, search: Search, teller: Teller) -> Fits:
    """The largest batch for which there is a plan: doubling, then bisection.

    Each is profiled within the budget and planned. One that the online budget cannot run counts as too large, so
    that the search never takes more memory than the budget.
    """
    tried: list[Tried] = []
    best: Fits | None = None

    def works(batch: int) -> bool:
        nonlocal best
        try:
            found = _planned(subject.trace_within(teller, budget, batch), budget, search, teller)
        except BudgetError as error:
            log.info("batch %d does not fit: %s", batch, error)
            tried.append(Tried(batch, fits=False))
            teller.say(f"batch {batch} does not fit")
            return False
        tried.append(Tried(batch, True, found.plan.predicted_peak_bytes, found.plan.predicted_step_s))
        teller.say(f"batch {batch} fits: {format_bytes(found.plan.predicted_peak_bytes)}")
        best = found
        return True

    largest = search_largest(works, subject.batch or 1)
    if best is None:
        # Not even one sample. Without the limit there may be a plan still, or a budget that works.
        best = _planned(subject.trace(teller, limit=budget, batch=1), budget, search, teller)
        largest = 1
    return Fits(best.plan, best.report, largest, tuple(tried))


def search_largest(works: Callable[[int], bool], start: int, most: int = MOST) -> int:
    """The largest number up to `most` that works, if every smaller one does too; 0 if none does."""
    low, high = 0, min(start, most)
    while works(high):
        low = high
        if high == most:
            return most
        high = min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if works(middle):
            low = middle
        else:
            high = middle
    return low


def said_of(subject: Subject, answer: Fits) -> str:
    """The answer in a sentence or two."""
    plan = answer.plan
    more = 100 * (plan.predicted_step_s / plan.plain_step_s - 1) if plan.plain_step_s > 0 else 0.0
    cost = f"with {more:.1f} % more time" if plan.recomputed or plan.offload else "with everything kept"
    batch = answer.batch or subject.batch
    state = "" if subject.optimizer == "none" else f", state of {subject.optimizer} included"
    sentence = (
        f"fits: {subject.name}{f', batch {batch}' if batch else ''}, peaks at "
        f"{format_bytes(plan.predicted_peak_bytes)} of {format_bytes(plan.budget_bytes)} {cost}{state}."
    )
    if answer.batch is None:
        return sentence
    beyond = "larger ones were not tried" if answer.batch == MOST else "no larger batch fits"
    tried = ", ".join(_shown(one) for one in sorted(answer.tried, key=lambda one: one.batch))
    return f"{sentence}\n{beyond}; tried: {tried}"


def _shown(one: Tried) -> str:
    return f"{one.batch} ({format_bytes(one.peak_bytes)})" if one.peak_bytes is not None else f"{one.batch} (no)"


def _planned(trace: Trace, budget: int, search: Search, teller: Teller) -> Fits:
    teller.phase("planning")
    codec_costs = codec_costs_for(trace, search.codecs)
    plan = solve(
        trace, budget, link=search.link, codec_costs=codec_costs, deadline_s=search.deadline_s, progress=teller.say
    )
    return Fits(plan, Report.of(trace, plan))
