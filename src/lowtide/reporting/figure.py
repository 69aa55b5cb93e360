"""A report as a matplotlib figure: live bytes over the step by category and by module, and the frontier."""

from __future__ import annotations

from typing import Any

from .._errors import MissingPackageError
from .._units import format_bytes
from .bands import Stack, stack_by_category, stack_by_module
from .frontier import Frontier
from .palette import Colour, colours_by_category, colours_by_module
from .report import Report
from .summary import BY_CATEGORY_TITLE, BY_MODULE_TITLE
from .ticks import ratio_ticks

_MIB = 2**20


def report_figure(report: Report) -> Any:
    """Return a figure with two panels, or three with a frontier. Raise `MissingPackageError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("matplotlib", "the figure of a report", extra="plots") from error
    panels = 2 if report.frontier is None else 3
    figure = Figure(figsize=(10, 4 * panels), layout="constrained")
    axes = figure.subplots(panels)
    categories, modules = stack_by_category(report.timeline), stack_by_module(report.timeline)
    _draw_stack(axes[0], report, categories, colours_by_category(categories), BY_CATEGORY_TITLE)
    _draw_stack(axes[1], report, modules, colours_by_module(modules), BY_MODULE_TITLE)
    if report.frontier is not None:
        _draw_frontier(axes[2], report, report.frontier)
    return figure


def _draw_stack(axes: Any, report: Report, stack: Stack, colours: list[Colour], title: str) -> None:
    if stack.intervals:
        axes.stackplot(
            stack.edges_s,
            # With step="post" a column lasts until the next one starts, so the last is repeated at the end.
            *([*band.live_bytes / _MIB, band.live_bytes[-1] / _MIB] for band in stack.bands),
            labels=[_escape(band.name) for band in stack.bands],
            colors=[colour.light for colour in colours],
            step="post",
            linewidth=0,
        )
        axes.set_xlim(stack.edges_s[0], max(stack.edges_s[-1], 1e-9))
        _mark_peak(axes, report)
    axes.axhline(report.plan.budget_bytes / _MIB, color="#c0392b", ls="--", lw=1.2, label="budget")
    axes.axvline(report.timeline.forward_s, color="#555555", lw=0.8, ls=":")
    axes.set_ylim(0, 1.12 * max(report.plan.budget_bytes, report.predicted_peak_bytes, 1) / _MIB)
    axes.set_title(title, loc="left")
    axes.set(xlabel="time (s). Dotted: end of forward", ylabel="live bytes (MiB)")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
    )


def _mark_peak(axes: Any, report: Report) -> None:
    at = report.timeline.intervals[report.timeline.peak]
    peak = report.predicted_peak_bytes
    axes.plot(at.start_s + at.duration_s / 2, peak / _MIB, "v", color="#222222", ms=6, clip_on=False)
    axes.annotate(
        f"peak {format_bytes(peak)}",
        (at.start_s + at.duration_s / 2, peak / _MIB),
        xytext=(8, 5),
        textcoords="offset points",
        fontsize="small",
    )


def _draw_frontier(axes: Any, report: Report, frontier: Frontier) -> None:
    axes.plot(
        report.predicted_peak_bytes / _MIB,
        report.predicted_step_s / frontier.plain_step_s,
        "o",
        ms=12,
        mfc="none",
        mec="#c0392b",
        mew=2,
        label="this plan",
    )
    axes.axvline(report.plan.budget_bytes / _MIB, color="#c0392b", ls="--", lw=1.2, label="budget")
    frontier.draw(axes)
    steps_s = [report.predicted_step_s, *(point.step_s for point in (*frontier.points, *frontier.baselines))]
    slowest = max(steps_s) / frontier.plain_step_s
    axes.set_yscale("log")
    axes.set_yticks(ratio_ticks(slowest), labels=[f"× {ratio:g}" for ratio in ratio_ticks(slowest)])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _escape(name: str) -> str:
    """Return the name as matplotlib shows it verbatim: $ would start a formula, a leading _ would hide the label."""
    name = name.replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name
