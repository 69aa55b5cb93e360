"""The page of `--report`: the plan of the model that was trained most, drawn."""

from __future__ import annotations

from pathlib import Path

from ..reporting.report import Report
from .step_finder import StepFinder
from .summary import main_family, typical_step_s


def write_page(finder: StepFinder, path: Path) -> str | None:
    """Write it; why it could not be written, or None."""
    state = max((state for _, state in finder.fitted), key=lambda state: state.steps, default=None)
    family = main_family(state) if state is not None else None
    if state is None or family is None or family.plan is None:
        return "no step has had a plan: it takes two steps of a kind"
    trace = family.planned_trace()
    if trace is None:
        return "the plan came from the cache, and no step was profiled"
    report = Report.of(
        trace, family.plan, measured_peak_bytes=state.measured_peak_bytes, measured_step_s=typical_step_s(state)
    )
    try:
        report.save_html(path)
    except OSError as error:
        return str(error)
    return None
