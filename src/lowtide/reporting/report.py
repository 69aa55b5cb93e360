"""One object that knows everything about a planned step; terminal, figure, page and timeline are views of it.

Made from a trace and a plan, without torch. All bytes are the simulator's; what was measured is shown beside
them where it is given. A view draws, it never computes anything about the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import ArgumentError
from .._units import format_bytes, format_time
from ..planning import Plan
from ..records import Trace
from .accounts import ModuleAccount, account_modules
from .frontier import Frontier
from .timeline import Timeline, follow

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Comparison:
    """One quantity, predicted and measured."""

    name: str
    predicted: str
    measured: str
    difference: float
    """Measured above predicted, as a share of predicted."""

    @property
    def percent(self) -> str:
        """The difference for people; nothing is never "-0.0 %"."""
        return f"{round(100 * self.difference, 1) + 0.0:+.1f} %"


@dataclass(frozen=True, eq=False)
class Report:
    """What a plan does with a step: when memory is full, of what, and what is done about it.

    `print` shows a summary, `rich.print` and `table()` a table, a notebook a page.
    """

    trace: Trace
    plan: Plan
    frontier: Frontier | None
    measured_peak_bytes: int | None
    measured_step_s: float | None
    timeline: Timeline = field(repr=False)
    modules: tuple[ModuleAccount, ...] = field(repr=False)

    @staticmethod
    def of(
        trace: Trace,
        plan: Plan,
        frontier: Frontier | None = None,
        measured_peak_bytes: int | None = None,
        measured_step_s: float | None = None,
    ) -> Report:
        """The report of a plan for the step that it was made for; `ArgumentError` for another step."""
        if not plan.matches(trace):
            raise ArgumentError(
                f"the plan was made for a step with fingerprint {plan.fingerprint}, and this trace has "
                f"{trace.fingerprint}: report on the trace that the plan was solved for"
            )
        followed = trace if plan.copies else trace.without_copies()
        timeline = follow(
            followed, plan.keep, plan.released, plan.offload_deadlines, plan.link, plan.codec_costs, plan.prefetches
        )
        return Report(trace, plan, frontier, measured_peak_bytes, measured_step_s, timeline, account_modules(timeline))

    @property
    def predicted_peak_bytes(self) -> int:
        """Of this trace under the plan: the plan's own number, if it was solved for just this trace."""
        return self.timeline.simulation.peak_bytes

    @property
    def predicted_step_s(self) -> float:
        """Of this trace under the plan."""
        return self.timeline.simulation.step_s

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Predicted against measured, for what was measured."""
        found = []
        if self.measured_peak_bytes is not None:
            peak = self.predicted_peak_bytes
            found.append(
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
            found.append(Comparison("step time", format_time(step_s), format_time(self.measured_step_s), share))
        return tuple(found)

    def __str__(self) -> str:
        return str(self.plan)

    def table(self) -> RenderableType:
        """Tables for a terminal: `rich.print(report.table())`."""
        from .terminal import report_tables

        return report_tables(self)

    def __rich__(self) -> RenderableType:
        return self.table()

    def figure(self) -> Any:
        """A matplotlib figure. Needs `pip install "lowtide[plots]"`."""
        from .figure import report_figure

        return report_figure(self)

    def save_png(self, path: str | Path) -> None:
        """Write the figure to a file."""
        self.figure().savefig(path, dpi=150, format="png")

    def to_html(self) -> str:
        """One page that needs nothing else: no network, no script from elsewhere."""
        from .page import report_page

        return report_page(self)

    def save_html(self, path: str | Path) -> None:
        """Write the page to a file."""
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        from .page import report_fragment

        return report_fragment(self)

    def to_chrome_trace(self) -> str:
        """The timeline as JSON for chrome://tracing and ui.perfetto.dev."""
        from .chrome_trace import chrome_trace

        return chrome_trace(self)

    def save_chrome_trace(self, path: str | Path) -> None:
        """Write the timeline to a file."""
        Path(path).write_text(self.to_chrome_trace(), encoding="utf-8")
