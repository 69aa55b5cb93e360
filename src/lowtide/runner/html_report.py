"""The HTML report of `lowtide run --report`: the plan of the model with the most steps."""

from __future__ import annotations

from pathlib import Path

from ..reporting.report import Report
from .step_finder import StepFinder
from .summary import largest_family, median_step_s


def write_html_report(finder: StepFinder, path: Path) -> str | None:
    """Write the report to `path`. Return the reason if no report could be written, else None."""
    fitted = max((fitted for _, fitted in finder.fitted), key=lambda fitted: fitted.steps, default=None)
    family = largest_family(fitted) if fitted is not None else None
    if fitted is None or family is None or family.plan is None:
        return "no step followed a plan; a plan needs at least two steps with the same step signature"
    trace = family.planned_trace()
    if trace is None:
        return "the plan came from the cache, so no step was profiled"
    report = Report.of(
        trace, family.plan, measured_peak_bytes=fitted.measured_peak_bytes, measured_step_s=median_step_s(fitted)
    )
    try:
        report.save_html(path)
    except OSError as error:
        return str(error)
    return None
