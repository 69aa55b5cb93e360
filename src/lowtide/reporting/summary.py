"""What every view of a report says in words: the few numbers that matter, and what the pictures cannot tell."""

from __future__ import annotations

from dataclasses import dataclass

from .._units import format_bytes, format_time
from .report import Report


@dataclass(frozen=True)
class Headline:
    """One number that matters."""

    label: str
    value: str
    detail: str


KINDS_CAPTION = (
    "A trace knows the bytes of each value, and of everything else only the sum. Gradients of parameters are told "
    "from temporaries by whether they stay to the end of the step, and parameters from other tensors by whether an op "
    "of forward reads them; optimizer state cannot be told from other tensors that are alive throughout. Memory that "
    "a kernel takes and gives back within one op is not counted."
)
MODULES_CAPTION = (
    "Values count for the module whose op made them, numbered modules together. Parameters, gradients and temporaries "
    "of backward are of no module here, because a trace knows only their sum."
)
FRONTIER_CAPTION = (
    "Each dot is a plan, judged by the simulator; lines only join them. No exact schedule lies below the bound: a plan "
    "that touches it is optimal."
)


def headlines(report: Report) -> tuple[Headline, ...]:
    """The plan in a few numbers."""
    plan, peak, step_s = report.plan, report.predicted_peak_bytes, report.predicted_step_s
    plain_s = plan.plain_step_s
    slower = f"{100 * (step_s / plain_s - 1):.1f} % more than {format_time(plain_s)}" if plain_s > 0 else ""
    released = f", {len(plan.released):,} ops more than once" if plan.released else ""
    moved = sum(row.offloaded_bytes for row in report.modules)
    packed = sum(row.compressed_bytes for row in report.modules)
    waited = f"; {format_time(report.timeline.simulation.store_wait_s)} of waiting for it"
    store = f"to the {plan.link.tier} and back{waited}" if plan.link else ""
    codecs = ", ".join(dict.fromkeys(codec_cost.codec for codec_cost in plan.codec_costs))
    return (
        Headline("peak", format_bytes(peak), _share(peak, plan.plain_peak_bytes, "without a plan")),
        Headline("budget", format_bytes(plan.budget_bytes), f"{format_bytes(plan.budget_bytes - peak)} left free"),
        Headline("step", format_time(step_s), slower),
        Headline("gap", f"{100 * plan.gap:.2f} %", "of a plain step a better plan could save at most"),
        Headline(
            "recompute",
            f"{len(plan.recomputed):,} ops",
            f"of {len(plan.keep):,}; {report.timeline.simulation.replayed_ops:,} replays{released}",
        ),
        *([Headline("offload", format_bytes(moved), store)] if moved else []),
        *([Headline("compress", format_bytes(packed), f"by {codecs}{'' if moved else waited}")] if packed else []),
    )


def peak_sentence(report: Report) -> str:
    """When memory is fullest."""
    timeline = report.timeline
    if not timeline.moments:
        return "The step has no ops."
    at = timeline.moments[timeline.peak]
    return (
        f"Fullest at {format_time(at.start_s)} of {format_time(timeline.duration_s)}: "
        f"{format_bytes(report.predicted_peak_bytes)}, {timeline.describe(timeline.peak)}."
    )


def _share(part: int, whole: int, name: str) -> str:
    return f"{100 * part / max(1, whole):.0f} % of {format_bytes(whole)} {name}"
