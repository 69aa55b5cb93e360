"""Pictures of a run: time against peak, one for each model. Needs matplotlib, no torch."""

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
NAMED = ("torch checkpoint", "schedules", "lowtide rules", "torch compile")
"""Families whose points differ in more than a budget, so each has its name beside it."""


def new_figure(width: float, height: float) -> Any:
    """A figure of matplotlib's, without any window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def frontier(model: ModelResult, subtitle: str, path: Path) -> None:
    """Every variant a point, those of one family that differ in a budget a curve, the planner's bound below."""
    figure = new_figure(8.6, 5.2)
    axes = figure.add_subplot()
    there = model.measured()
    points = {name: (100 * model.peak_share(name), 100 * (model.ratio(name) - 1)) for name in there}
    top = _top([y for name, (_, y) in points.items() if there[name].family != "lowtide online"])
    axes.axhline(0, color="0.75", lw=1, zorder=0)
    beyond = 0
    for family, style in STYLES.items():
        names = sorted((name for name in points if there[name].family == family), key=lambda name: points[name])
        if not names:
            continue
        above = [name for name in names if points[name][1] > top]
        xs, ys = zip(*(points[name] for name in names), strict=True)
        axes.plot(xs, ys, **style, label=family, zorder=4 if family == "lowtide planned" else 3, alpha=0.9)
        for name in above:
            axes.annotate(
                f"{name} {points[name][1]:+.0f} %", (points[name][0], top), xytext=(0, -4 - 10 * beyond), fontsize=7,
                textcoords="offset points", ha="center", va="top", color=style["color"],
            )  # fmt: skip
            beyond += 1
        if family in NAMED:
            for name in set(names) - set(above):
                axes.annotate(
                    name.split(":")[-1], points[name], xytext=(6, 5), textcoords="offset points", fontsize=7,
                    color=style["color"],
                )  # fmt: skip
    if bound := _bound(model):
        # What is proved for a budget holds for every smaller one, up to the next that was asked.
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


def _top(heights: list[float]) -> float:
    """Above all but what would squeeze the others."""
    ordered = sorted(heights)
    usual = ordered[int(0.75 * (len(ordered) - 1))] if ordered else 0.0
    return max([5.0, *(1.15 * y for y in ordered if y <= max(40.0, 4 * usual))])


def _bound(model: ModelResult) -> list[tuple[float, float]]:
    """By budget asked of the planner: the least time of any plan, in the units of the picture."""
    plain_bytes = model.plain.peak_bytes or 1
    said = sorted(
        (100 * min(1.0, one.asked_bytes / plain_bytes), 100 * least)
        for name, one in model.variants.items()
        if one.family == "lowtide planned" and one.asked_bytes is not None
        if (least := model.said(name, "bound")) is not None
    )
    # A smaller budget needs no less time, even where the planner proved less about it.
    return [(share, max(least for _, least in said[k:])) for k, (share, _) in enumerate(said)]
