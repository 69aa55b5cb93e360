"""The HTML report of `lowtide run --report`: the plan of the model with the most steps."""

from __future__ import annotations

from pathlib import Path

from ..reporting.report import Report
from .step_finder import StepFinder
from .summary import largest_plan, median_step_s


def write_html_report(finder: StepFinder, path: Path) -> str | None:
    """Write the report to `path`. Return the reason if no report could be written, else None."""
    fitted = max((fitted for _, fitted in finder.fitted), key=lambda fitted: fitted.steps, default=None)
    largest = largest_plan(fitted) if fitted is not None else None
    if fitted is None or largest is None:
        return "no step followed a plan; a plan needs at least two steps with the same step signature"
    if largest.trace is None:
        return "the plan came from the cache, so no step was profiled"
    report = Report.of(
        largest.trace,
        largest.plan,
        measured_peak_bytes=fitted.measured_peak_bytes,
        measured_step_s=median_step_s(fitted),
    )
    try:
        report.save_html(path)
    except OSError as error:
        return str(error)
    return None
