"""The summary of `lowtide run`: budget, peak, steps, time and plan of each trained model."""

from __future__ import annotations

import statistics

from .._units import format_bytes, format_time
from ..engine.runtime import current_runtime
from ..fitting.fitted_model import FittedModel
from ..fitting.variant import SizedPlan
from ..records.budget_report import BudgetReport
from .step_finder import StepFinder

_NO_STEP = (
    "no training step was found, so lowtide did nothing. A training step is a call of a module in training mode, "
    "with parameters that require gradients and gradients enabled, followed by a backward pass. Not supported: "
    "training in processes that the script spawns, models in eval(), and gradients computed by torch.func."
)
_MAX_MODELS = 4


def summarise(finder: StepFinder, *, stopped: bool = False) -> str:
    """Return the summary of all models, as several lines. `stopped`: a budget that was not met has ended the script."""
    budget_bytes = finder.settings.budget_bytes
    trained = [(name, fitted) for name, fitted in finder.fitted if fitted.steps]
    if not trained:
        called = ", ".join(dict.fromkeys(name for name, _ in finder.fitted))
        if stopped:
            return f"no step was completed{f'; called: {called}' if called else ''}."
        skipped = "".join(f"\n{name} was trained without a budget: {reason}" for name, reason in finder.skipped)
        return _NO_STEP + (f" Called without a backward pass: {called}." if called else "") + skipped
    peak_bytes = current_runtime().memory().ledger.peak_bytes
    verdict = "within" if peak_bytes <= budget_bytes else f"{format_bytes(peak_bytes - budget_bytes)} above"
    lines = [
        f"the peak was {format_bytes(peak_bytes)}, {verdict} the budget of {format_bytes(budget_bytes)} "
        "(live tensors of this process in the measured steps)"
    ]
    for name, fitted in trained[:_MAX_MODELS]:
        lines += _model_lines(name, fitted)
    if len(trained) > _MAX_MODELS:
        lines.append(f"and {len(trained) - _MAX_MODELS} more models")
    lines += [f"{name} was trained without a budget: {reason}" for name, reason in finder.skipped]
    return "\n".join(lines)


def largest_plan(fitted: FittedModel) -> SizedPlan | None:
    """Return the plan with the largest predicted peak that steps have followed, or None."""
    plans = [sized for family in fitted.families.values() for sized in family.plans if sized.followed_steps]
    return max(plans, key=lambda sized: sized.plan.predicted_peak_bytes, default=fitted.last_plan)


def median_step_s(fitted: FittedModel) -> float | None:
    """Return the median time of the steps that followed their plan, or None if there is none."""
    return statistics.median(fitted.planned_seconds) if fitted.planned_seconds else None


def _model_lines(name: str, fitted: FittedModel) -> list[str]:
    signatures = len(fitted.families)
    lines = [
        name,
        f"  steps    {fitted.steps:,}: {fitted.online_steps:,} online, {fitted.steps - fitted.online_steps:,} planned; "
        f"{signatures:,} step signature{'' if signatures == 1 else 's'}; {fitted.planning_s:.1f} s of planning",
    ]
    if fitted.measured_peak_bytes is not None and fitted.predicted_peak_bytes is not None:
        lines.append(
            f"  peak     {format_bytes(fitted.predicted_peak_bytes)} predicted, "
            f"{format_bytes(fitted.measured_peak_bytes)} measured (last measured step with a plan)"
        )
    largest, step_s = largest_plan(fitted), median_step_s(fitted)
    if largest is not None:
        plan = largest.plan
        if step_s is not None:
            lines.append(_time_line(step_s, plan.plain_step_s))
        kept_bytes = sum(module.kept_bytes for module in plan.modules)
        recomputed_bytes = sum(module.recomputed_bytes for module in plan.modules)
        lines.append(
            f"  plan     keeps {format_bytes(kept_bytes)}, recomputes {format_bytes(recomputed_bytes)}: "
            f"{len(plan.recomputed):,} of {len(plan.keep):,} ops"
        )
    else:
        why = fitted.why_unplanned()
        if why is not None:
            lines.append(f"  no plan  {why}")
        context = current_runtime().last_context
        if context is not None and context.memory_budget is not None:
            lines.append(f"  online   {_evictions(context.memory_budget.report())}")
    return lines


def _time_line(step_s: float, plain_s: float) -> str:
    ratio = (
        f", × {step_s / plain_s:.2f} of {format_time(plain_s)}, the time of all ops without recomputation"
        if plain_s > 0
        else ""
    )
    return f"  time     {format_time(step_s)} per planned step (median){ratio}"


def _evictions(report: BudgetReport) -> str:
    parts = [f"{report.values_dropped:,} values dropped for recomputation ({format_bytes(report.bytes_dropped)})"]
    if report.values_compressed:
        parts.append(f"{report.values_compressed:,} compressed ({format_bytes(report.bytes_compressed)})")
    if report.values_offloaded:
        parts.append(f"{report.values_offloaded:,} offloaded to {report.store} ({format_bytes(report.bytes_written)})")
    return f"in the last step {', '.join(parts)}"
