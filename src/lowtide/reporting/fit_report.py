"""The report of a fitted model: its plan, and whether it was right."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._errors import ArgumentError
from .._units import format_bytes
from ..planning import Plan
from ..records import Trace
from .report import Report


@dataclass(frozen=True)
class FitReport:
    """What a fitted model did so far."""

    budget_bytes: int
    plan: Plan | None
    """Of the last kind of step; None while there is none."""
    predicted_peak_bytes: int | None
    """For the step that was measured: the plan's, and what came to be alive beside the step since it was made."""
    measured_peak_bytes: int | None
    """Of the last planned step that was measured: the first ones after planning, then one in a hundred."""
    steps: int
    online_steps: int
    """Steps without a plan, or that differed from it."""
    step_signatures: int
    """Different shapes of inputs, with and without gradients to add to."""
    step_seconds: tuple[float, ...] = field(repr=False)
    """From the call of the model to the end of backward, the last thousand."""
    planned_seconds: tuple[float, ...] = field(repr=False)
    """Of those that went by a plan."""
    planning_s: float
    trace: Trace | None = field(default=None, repr=False)
    """The profiled step that the plan was made for; None with a plan that was given or kept from an earlier run."""

    def details(self) -> Report:
        """The planned step, moment by moment: as tables, a picture, a page or a timeline.

        `lowtide.report(model).details().save_html("step.html")`. `ArgumentError` while there is no plan of a step
        that was profiled.
        """
        if self.plan is None or self.trace is None:
            raise ArgumentError(
                "there is no planned step to show yet: two steps of a kind have to be taken, the first of which is "
                "profiled (one with a plan that was given or kept is not: profile it with lowtide.plan)"
            )
        seconds = sorted(self.planned_seconds)
        typical_s = seconds[len(seconds) // 2] if seconds else None
        return Report.of(self.trace, self.plan, measured_peak_bytes=self.measured_peak_bytes, measured_step_s=typical_s)

    def __str__(self) -> str:
        lines = [
            f"steps        {self.steps:,}, of these {self.online_steps:,} without a plan; "
            f"{self.step_signatures} kinds of steps; {self.planning_s:.1f} s of planning",
            f"budget       {format_bytes(self.budget_bytes)}",
        ]
        if self.predicted_peak_bytes is not None and self.measured_peak_bytes is not None:
            lines.append(
                f"peak         {format_bytes(self.measured_peak_bytes)} measured, "
                f"{format_bytes(self.predicted_peak_bytes)} predicted"
            )
        if self.plan is not None:
            lines += ["", str(self.plan)]
        return "\n".join(lines)
