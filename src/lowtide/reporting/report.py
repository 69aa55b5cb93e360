"""Report of a planned step. Terminal tables, figure, HTML page and Chrome trace are views of one `Report`.

A report is computed from a trace and a plan, without torch. All bytes come from the simulator; measured numbers
are optional. Views only draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import ArgumentError
from .._units import format_bytes, format_time
from ..planning import Plan
from ..records import Trace
from .frontier import Frontier
from .module_totals import ModuleTotals, totals_by_module
from .timeline import Timeline, build_timeline

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured number of one quantity."""

    name: str
    predicted: str
    measured: str
    difference: float
    """(measured - predicted) / predicted."""

    @property
    def percent(self) -> str:
        """The difference as text, never "-0.0 %"."""
        return f"{round(100 * self.difference, 1) + 0.0:+.1f} %"


@dataclass(frozen=True, eq=False)
class Report:
    """Live bytes over a planned step, decisions by module, and predicted against measured numbers.

    `print` shows a summary, `rich.print` shows tables, and a notebook shows the HTML page.
    """

    trace: Trace
    plan: Plan
    frontier: Frontier | None
    measured_peak_bytes: int | None
    measured_step_s: float | None
    timeline: Timeline = field(repr=False)
    modules: tuple[ModuleTotals, ...] = field(repr=False)

    @staticmethod
    def of(
        trace: Trace,
        plan: Plan,
        frontier: Frontier | None = None,
        measured_peak_bytes: int | None = None,
        measured_step_s: float | None = None,
    ) -> Report:
        """Return the report of a plan. Raise `ArgumentError` if the plan was solved for another trace."""
        if not plan.matches(trace):
            raise ArgumentError(
                f"the plan was solved for a trace with fingerprint {plan.fingerprint}, but this trace has fingerprint "
                f"{trace.fingerprint}: report on the trace that the plan was solved for"
            )
        simulated = trace if plan.copies else trace.without_copies()
        timeline = build_timeline(
            simulated, plan.keep, plan.released, plan.offload_deadlines, plan.link, plan.codec_costs, plan.prefetches
        )
        return Report(trace, plan, frontier, measured_peak_bytes, measured_step_s, timeline, totals_by_module(timeline))

    @property
    def predicted_peak_bytes(self) -> int:
        """Simulated peak of this trace under the plan."""
        return self.timeline.simulation.peak_bytes

    @property
    def predicted_step_s(self) -> float:
        """Simulated step time of this trace under the plan."""
        return self.timeline.simulation.step_s

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Predicted against measured numbers, for the quantities that were measured."""
        comparisons = []
        if self.measured_peak_bytes is not None:
            peak = self.predicted_peak_bytes
            comparisons.append(
                Comparison(
                    "peak",
                    format_bytes(peak),
                    format_bytes(self.measured_peak_bytes),
                    self.measured_peak_bytes / max(1, peak) - 1,
                )
            )
        if self.measured_step_s is not None:
            step_s = self.predicted_step_s
            share = self.measured_step_s / step_s - 1 if step_s > 0 else 0.0
            comparisons.append(Comparison("step time", format_time(step_s), format_time(self.measured_step_s), share))
        return tuple(comparisons)

    def __str__(self) -> str:
        return str(self.plan)

    def table(self) -> RenderableType:
        """Return tables for a terminal: `rich.print(report.table())`."""
        from .terminal import report_tables

        return report_tables(self)

    def __rich__(self) -> RenderableType:
        return self.table()

    def figure(self) -> Any:
        """Return a matplotlib figure. Needs `pip install "lowtide[plots]"`."""
        from .figure import report_figure

        return report_figure(self)

    def save_png(self, path: str | Path) -> None:
        """Write the figure to a file."""
        self.figure().savefig(path, dpi=150, format="png")

    def to_html(self) -> str:
        """Return a self-contained HTML page that loads nothing from the network."""
        from .page import report_page

        return report_page(self)

    def save_html(self, path: str | Path) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        from .page import report_fragment

        return report_fragment(self)

    def to_chrome_trace(self) -> str:
        """Return the timeline as JSON for chrome://tracing and ui.perfetto.dev."""
        from .chrome_trace import chrome_trace

        return chrome_trace(self)

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write the timeline to a file."""
        Path(path).write_text(self.to_chrome_trace(), encoding="utf-8")
