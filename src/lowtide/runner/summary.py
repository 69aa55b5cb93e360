"""What `lowtide run` says when the program has ended: budget, peak, steps, time, and what was decided."""

from __future__ import annotations

import statistics

from .._units import format_bytes, format_time
from ..engine.runtime import current_runtime
from ..fitting.families import StepFamily
from ..fitting.fitted_model import FittedModel
from ..records.budget_report import BudgetReport
from .step_finder import StepFinder

_NO_STEP = (
    "no training step was found, so nothing was done: a step is a call of a module with parameters that require "
    "gradients, in training mode, with gradients enabled, and a backward pass through it. Not covered are training "
    "in processes that the program spawns, models in eval() and gradients taken by torch.func."
)
_MOST_MODELS = 4


def summarise(finder: StepFinder) -> str:
    """All of it, a line for each matter."""
    budget = finder.settings.budget_bytes
    trained = [(name, state) for name, state in finder.fitted if state.steps]
    if not trained:
        called = ", ".join(dict.fromkeys(name for name, _ in finder.fitted))
        return _NO_STEP + (f" Called like this, but without a backward pass: {called}." if called else "")
    peak = current_runtime().memory().ledger.peak_bytes
    verdict = "within" if peak <= budget else f"{format_bytes(peak - budget)} more than"
    lines = [
        f"the peak was {format_bytes(peak)}, {verdict} the budget of {format_bytes(budget)} "
        "(live tensors of this process, in the steps that were measured)"
    ]
    for name, state in trained[:_MOST_MODELS]:
        lines += _lines_of(name, state)
    if len(trained) > _MOST_MODELS:
        lines.append(f"and {len(trained) - _MOST_MODELS} more models")
    return "\n".join(lines)


def main_family(state: FittedModel) -> StepFamily | None:
    """The kind of step whose plan takes the most memory, if there is a plan."""
    planned = [family for family in state.families.values() if family.plan is not None]
    return max(planned, key=_predicted_bytes, default=None)


def typical_step_s(state: FittedModel) -> float | None:
    """The median of the steps that went as planned."""
    return statistics.median(state.planned_seconds) if state.planned_seconds else None


def _predicted_bytes(family: StepFamily) -> int:
    return family.plan.predicted_peak_bytes + family.grown_bytes if family.plan is not None else 0


def _lines_of(name: str, state: FittedModel) -> list[str]:
    lines = [
        name,
        f"  steps    {state.steps:,}: {state.online_steps:,} online, {state.steps - state.online_steps:,} planned; "
        f"{_count(len(state.families), 'family')}; {state.planning_s:.1f} s of planning",
    ]
    if state.measured_peak_bytes is not None and state.predicted_peak_bytes is not None:
        lines.append(
            f"  peak     {format_bytes(state.predicted_peak_bytes)} predicted, "
            f"{format_bytes(state.measured_peak_bytes)} measured, in the last planned step that was measured"
        )
    family, step_s = main_family(state), typical_step_s(state)
    if family is not None and family.plan is not None:
        if step_s is not None:
            lines.append(_time_line(step_s, family.plan.plain_step_s))
        kept = sum(module.kept_bytes for module in family.plan.kinds)
        remade = sum(module.recomputed_bytes for module in family.plan.kinds)
        lines.append(
            f"  plan     keeps {format_bytes(kept)}, recomputes {format_bytes(remade)}: "
            f"{len(family.plan.recomputed):,} of {len(family.plan.keep):,} ops"
        )
    else:
        context = current_runtime().last_context
        if context is not None and context.memory_budget is not None:
            lines.append(f"  online   {_evictions(context.memory_budget.report())}")
    return lines


def _time_line(step_s: float, plain_s: float) -> str:
    against = f", × {step_s / plain_s:.2f} of {format_time(plain_s)}" if plain_s > 0 else ""
    return (
        f"  time     {format_time(step_s)} a planned step (median){against}: what the ops of the profiled step took, "
        "with nothing recomputed"
    )


def _evictions(done: BudgetReport) -> str:
    parts = [f"{done.values_dropped:,} values dropped, to be made again ({format_bytes(done.bytes_dropped)})"]
    if done.values_compressed:
        parts.append(f"{done.values_compressed:,} compressed ({format_bytes(done.bytes_compressed)})")
    if done.values_offloaded:
        parts.append(f"{done.values_offloaded:,} written to {done.store} ({format_bytes(done.bytes_written)})")
    return f"no plan yet; in the last step {', '.join(parts)}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
