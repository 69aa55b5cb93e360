"""Texts shared by the views of a report: titles, captions and the key numbers."""

from __future__ import annotations

from dataclasses import dataclass

from .._units import format_bytes, format_time
from .report import Report


@dataclass(frozen=True)
class Headline:
    """One key number of a report."""

    label: str
    value: str
    detail: str


BY_CATEGORY_TITLE = "Live bytes over the step, by category"
BY_CATEGORY_CAPTION = (
    "A trace has the size of each value. For all other memory it has only the sum, which is split as follows. Memory "
    "that backward allocates and that stays until the end of the step counts as gradients, the rest as temporary. "
    "Tensors that forward reads count as parameters. Optimizer state counts as other. Scratch memory inside a kernel "
    "is not counted."
)
BY_MODULE_TITLE = "Live bytes over the step, by module"
BY_MODULE_CAPTION = (
    "Each value counts for the module whose op produced it. Modules that differ only in an index are merged. "
    "Parameters, gradients and temporaries of backward belong to no module, because a trace has only their sum."
)
FRONTIER_CAPTION = (
    "Each dot is a simulated plan. Dotted: proven lower bound on step time. A plan on the dotted line is optimal."
)


def headlines(report: Report) -> tuple[Headline, ...]:
    """Return the key numbers of the plan."""
    plan, peak, step_s = report.plan, report.predicted_peak_bytes, report.predicted_step_s
    plain_s = plan.plain_step_s
    overhead = f"{100 * (step_s / plain_s - 1):.1f} % more than {format_time(plain_s)}" if plain_s > 0 else ""
    released = f", {len(plan.released):,} ops replayed more than once" if plan.released else ""
    offloaded = sum(row.offloaded_bytes for row in report.modules)
    compressed = sum(row.compressed_bytes for row in report.modules)
    wait = f"; the step waits {format_time(report.timeline.simulation.store_wait_s)} for transfers and codecs"
    store = f"to the {plan.link.tier} and back{wait}" if plan.link else ""
    codecs = ", ".join(dict.fromkeys(codec_cost.codec for codec_cost in plan.codec_costs))
    codec_detail = f"by {codecs}{'' if offloaded else wait}"
    return (
        Headline("peak", format_bytes(peak), _share(peak, plan.plain_peak_bytes, "in plain PyTorch")),
        Headline("budget", format_bytes(plan.budget_bytes), f"{format_bytes(plan.budget_bytes - peak)} unused"),
        Headline("step", format_time(step_s), overhead),
        Headline("gap", f"{100 * plan.gap:.2f} %", "above the lower bound, relative to a plain step"),
        Headline(
            "recompute",
            f"{len(plan.recomputed):,} ops",
            f"of {len(plan.keep):,}; {report.timeline.simulation.replayed_ops:,} replays{released}",
        ),
        *([Headline("offload", format_bytes(offloaded), store)] if offloaded else []),
        *([Headline("compress", format_bytes(compressed), codec_detail)] if compressed else []),
    )


def peak_sentence(report: Report) -> str:
    """Return a sentence that says when the peak is reached and by which op."""
    timeline = report.timeline
    if not timeline.intervals:
        return "The step has no ops."
    at = timeline.intervals[timeline.peak]
    return (
        f"Peak of {format_bytes(report.predicted_peak_bytes)} at {format_time(at.start_s)} of "
        f"{format_time(timeline.duration_s)}: {timeline.describe(timeline.peak)}."
    )


def _share(part: int, whole: int, name: str) -> str:
    return f"{100 * part / max(1, whole):.0f} % of {format_bytes(whole)} {name}"
