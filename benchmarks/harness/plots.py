"""Plots of a run: overhead against peak, one plot for each model. Needs matplotlib, no torch."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from .records import ModelResult

STYLES: dict[str, dict[str, Any]] = {
    "plain": {"color": "0.25", "marker": "*", "ms": 11, "ls": ""},
    "torch checkpoint": {"color": "#c0392b", "marker": "s", "ms": 8, "ls": ""},
    "torch SAC": {"color": "#d9730d", "marker": "D", "ms": 8, "ls": ""},
    "torch offload": {"color": "#8d6e63", "marker": "v", "ms": 8, "ls": ""},
    "torch compile": {"color": "#4d9d79", "marker": "P", "ms": 8, "ls": "-", "lw": 1.2},
    "torch remat": {"color": "#b8860b", "marker": "p", "ms": 9, "ls": ""},
    "rotor": {"color": "#8a4fbf", "marker": "h", "ms": 8, "ls": ":", "lw": 1.2},
    "h-DTR": {"color": "#7f8c8d", "marker": "d", "ms": 7, "ls": ""},
    "schedules": {"color": "#8a4fbf", "marker": "X", "ms": 8, "ls": ""},
    "lowtide planned, disk": {"color": "#0b3d91", "marker": "s", "ms": 7, "ls": "-.", "lw": 1.2},
    "lowtide rules": {"color": "#5dade2", "marker": "^", "ms": 8, "ls": ""},
    "lowtide online": {"color": "#5dade2", "marker": "o", "ms": 5, "ls": "--", "lw": 1.2},
    "lowtide planned": {"color": "#0b6e99", "marker": "o", "ms": 7, "ls": "-", "lw": 2.2},
}
LABELLED = ("torch checkpoint", "schedules", "lowtide rules", "torch compile")
"""Families whose variants differ in more than a budget: each point gets a label."""


def new_figure(width: float, height: float) -> Any:
    """Return a figure of matplotlib that opens no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def frontier(model: ModelResult, subtitle: str, path: Path) -> None:
    """Plot one point for each variant, a line through the budgets of each family, and the lower bound."""
    figure = new_figure(8.6, 5.2)
    axes = figure.add_subplot()
    measured = model.measured()
    points = {name: (100 * model.peak_share(name), 100 * (model.ratio(name) - 1)) for name in measured}
    top = _upper_limit([y for name, (_, y) in points.items() if measured[name].family != "lowtide online"])
    axes.axhline(0, color="0.75", lw=1, zorder=0)
    outliers = 0
    for family, style in STYLES.items():
        names = sorted((name for name in points if measured[name].family == family), key=lambda name: points[name])
        if not names:
            continue
        above = [name for name in names if points[name][1] > top]
        xs, ys = zip(*(points[name] for name in names), strict=True)
        axes.plot(xs, ys, **style, label=family, zorder=4 if family == "lowtide planned" else 3, alpha=0.9)
        for name in above:
            axes.annotate(
                f"{name} {points[name][1]:+.0f} %", (points[name][0], top), xytext=(0, -4 - 10 * outliers), fontsize=7,
                textcoords="offset points", ha="center", va="top", color=style["color"],
            )  # fmt: skip
            outliers += 1
        if family in LABELLED:
            for name in set(names) - set(above):
                axes.annotate(
                    name.split(":")[-1], points[name], xytext=(6, 5), textcoords="offset points", fontsize=7,
                    color=style["color"],
                )  # fmt: skip
    if bound := _bound(model):
        # The bound of a budget also holds for smaller budgets, down to the next measured one.
        style = {"ls": ":", "color": "0.4", "lw": 1.5, "drawstyle": "steps-pre", "zorder": 2}
        axes.plot(*zip(*bound, strict=True), **style, label="lower bound")
    low = min([0.0, *(y for _, y in points.values())])
    axes.set_ylim(low - 0.08 * (top - low), top)
    axes.set_xlabel("peak of live tensor bytes, % of plain PyTorch")
    axes.set_ylabel("overhead, % of a plain step")
    figure.suptitle(model.title, fontsize=12)
    axes.set_title("\n".join(textwrap.wrap(subtitle, 110)), fontsize=7, color="0.35")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def _upper_limit(overheads: list[float]) -> float:
    """Return the upper limit of the axis. Outliers that would compress all other points are above it."""
    ordered = sorted(overheads)
    typical = ordered[int(0.75 * (len(ordered) - 1))] if ordered else 0.0
    return max([5.0, *(1.15 * y for y in ordered if y <= max(40.0, 4 * typical))])


def _bound(model: ModelResult) -> list[tuple[float, float]]:
    """Return the lower bound of each budget, as (peak, overhead) in the units of the plot."""
    plain_bytes = model.plain.peak_bytes or 1
    bounds = sorted(
        (100 * min(1.0, one.asked_bytes / plain_bytes), 100 * bound)
        for name, one in model.variants.items()
        if one.family == "lowtide planned" and one.asked_bytes is not None
        if (bound := model.planned_overhead(name, "bound")) is not None
    )
    # A bound for a larger budget also holds for a smaller one, for which the planner may have proved less.
    return [(share, max(bound for _, bound in bounds[k:])) for k, (share, _) in enumerate(bounds)]
