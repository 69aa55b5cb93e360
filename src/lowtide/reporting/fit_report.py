"""Report of a fitted model: its plan, with predicted and measured numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._errors import ArgumentError
from .._units import format_bytes, format_time
from ..planning import Plan
from ..records import Trace
from .report import Report

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Rung:
    """A plan for steps of similar size."""

    sizes: Sizes
    """Dimensions of all input tensors of the largest step that the plan was made for."""
    predicted_peak_bytes: int
    """Peak of that step."""
    steps: int
    """Steps that have followed the plan."""


@dataclass(frozen=True)
class FamilyReport:
    """Steps with one signature. They differ in sizes only."""

    steps: int
    unplanned_steps: int
    """Steps that were profiled, had no plan, or differed from their plan."""
    sizes: tuple[Sizes, ...]
    """The different sizes of these steps: the dimensions of all input tensors."""
    variants: int
    """Sequences of ops that were profiled. Steps with other ops have plans of their own."""
    profiled: tuple[Sizes, ...]
    rungs: tuple[Rung, ...]

    def __str__(self) -> str:
        rows = [*self.sizes, *self.profiled, *(rung.sizes for rung in self.rungs)]
        varying = dict.fromkeys(column for column in zip(*rows, strict=True) if len(set(column)) > 1)
        shown = {row: "×".join(str(column[i]) for column in varying) for i, row in enumerate(rows)}
        plans = ", ".join(f"up to {shown[rung.sizes]} ({rung.steps:,} steps)" for rung in self.rungs[:_MAX_RUNGS])
        more = f" and {len(self.rungs) - _MAX_RUNGS} more" if len(self.rungs) > _MAX_RUNGS else ""
        kinds = f" in {self.variants} variants" if self.variants > 1 else ""
        return (
            f"{len(self.sizes):,} sizes in {self.steps:,} steps, {self.unplanned_steps:,} of them without a plan; "
            f"profiled{kinds}: {', '.join(shown[row] for row in self.profiled)}; plans: {plans or 'none'}{more}"
        )


_MAX_RUNGS = 8
"""Plans listed for one family."""


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
    """Number of step signatures: dtypes and numbers of dimensions of the inputs, flags, and whether there are gradients
    before the step. Steps of different sizes have the same signature."""
    step_seconds: tuple[float, ...] = field(repr=False)
    """Times from the call of the model to the end of backward, for the last thousand steps."""
    planned_seconds: tuple[float, ...] = field(repr=False)
    """The same for steps that followed a plan."""
    planning_s: float
    trace: Trace | None = field(default=None, repr=False)
    """The profiled step of the plan; None if the plan was passed in or loaded from the cache."""
    families: tuple[FamilyReport, ...] = ()
    """By step signature: sizes, profiles and plans."""
    why_unplanned: str | None = None
    """Why no step has followed a plan so far; None if one has, or if there was no step."""

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
        if self.why_unplanned is not None:
            lines.append(f"no plan      {self.why_unplanned}")
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
        lines += [f"sizes        {family}" for family in self.families if len(family.sizes) > 1]
        if self.plan is not None:
            lines += ["", str(self.plan)]
        return "\n".join(lines)
