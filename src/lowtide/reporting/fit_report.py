"""Report of a fitted model: its plan, with predicted and measured numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._errors import ArgumentError
from .._units import format_bytes, format_time
from ..planning import Plan
from ..records import Trace
from .report import Report


@dataclass(frozen=True)
class FitReport:
    """Steps, plan and peak of a fitted model so far."""

    budget_bytes: int
    plan: Plan | None
    """Plan of the latest step signature; None before the first plan."""
    predicted_peak_bytes: int | None
    """Predicted peak of the measured step: the peak of the plan plus bytes that became live outside the step since."""
    measured_peak_bytes: int | None
    """Peak of the last measured step. The first steps after planning are measured, then one in a hundred."""
    steps: int
    online_steps: int
    """Steps that had no plan or differed from their plan."""
    step_signatures: int
    """Number of step signatures: input shapes, with and without accumulated gradients."""
    step_seconds: tuple[float, ...] = field(repr=False)
    """Times from the call of the model to the end of backward, for the last thousand steps."""
    planned_seconds: tuple[float, ...] = field(repr=False)
    """The same for steps that followed a plan."""
    planning_s: float
    trace: Trace | None = field(default=None, repr=False)
    """The profiled step of the plan; None if the plan was passed in or loaded from the cache."""

    @property
    def measured_step_s(self) -> float | None:
        """Median time of the steps that followed a plan; None before the first one."""
        seconds = sorted(self.planned_seconds)
        return seconds[len(seconds) // 2] if seconds else None

    def details(self) -> Report:
        """Return the report of the planned step: `lowtide.report(model).details().save_html("step.html")`.

        Raise `ArgumentError` if there is no plan, or if its step was not profiled in this run.
        """
        if self.plan is None or self.trace is None:
            raise ArgumentError(
                "there is no planned step to show yet: run two steps with the same signature; the first is profiled "
                "(a model with a given or cached plan is not profiled: call lowtide.plan for a profile)"
            )
        return Report.of(
            self.trace,
            self.plan,
            measured_peak_bytes=self.measured_peak_bytes,
            measured_step_s=self.measured_step_s,
        )

    def __str__(self) -> str:
        lines = [
            f"steps        {self.steps:,}, {self.online_steps:,} of them without a plan; "
            f"step signatures: {self.step_signatures}; planning time {self.planning_s:.1f} s",
            f"budget       {format_bytes(self.budget_bytes)}",
        ]
        if self.predicted_peak_bytes is not None and self.measured_peak_bytes is not None:
            lines.append(
                f"peak         {format_bytes(self.measured_peak_bytes)} measured, "
                f"{format_bytes(self.predicted_peak_bytes)} predicted"
            )
        if self.plan is not None and self.measured_step_s is not None:
            lines.append(
                f"step time    {format_time(self.measured_step_s)} measured, median of {len(self.planned_seconds):,}; "
                f"{format_time(self.plan.predicted_step_s)} predicted, without the recorder"
            )
        if self.plan is not None:
            lines += ["", str(self.plan)]
        return "\n".join(lines)
