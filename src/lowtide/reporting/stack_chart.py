"""Stacked area chart of live bytes as SVG. The chart is complete without scripts; embedded data feed the cursor."""

from __future__ import annotations

from .._units import format_bytes, format_time
from .bands import Stack
from .markup import Markup, data_script, join, tag
from .palette import Colour
from .report import Report
from .svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Scale, label, line, swatch
from .ticks import byte_unit, round_ticks, time_unit


def stack_chart(report: Report, stack: Stack, colours: list[Colour], name: str) -> Markup:
    """Return a figure with areas, budget, peak, end of forward and a legend."""
    budget = report.plan.budget_bytes
    high = 1.1 * max(budget, report.predicted_peak_bytes, 1)
    x = Scale(stack.edges_s[0], stack.edges_s[-1], LEFT, WIDTH - RIGHT)
    y = Scale(0, high, HEIGHT - BOTTOM, TOP)
    svg = tag(
        "svg",
        {
            "viewBox": f"0 0 {WIDTH:g} {HEIGHT:g}",
            "role": "img",
            "tabindex": 0,
            "aria-label": f"{name}: peak {format_bytes(report.predicted_peak_bytes)}, budget {format_bytes(budget)}",
        },
        _grid(x, y, high, stack.edges_s[-1]),
        *_areas(stack, colours, x, y),
        _end_of_forward(report, x),
        line("lt-budget", LEFT, y(budget), WIDTH - RIGHT, y(budget)),
        _budget_label(report, x, y),
        _peak(report, x, y),
        line("lt-cursor", LEFT, TOP, LEFT, HEIGHT - BOTTOM),
    )
    return tag(
        "figure",
        {"class": "lt-stack"},
        svg,
        _legend(stack, colours),
        tag("div", {"class": "lt-tip", "hidden": ""}),
        data_script(_hover_data(report, stack, colours, x)),
    )


def _grid(x: Scale, y: Scale, high: float, duration_s: float) -> Markup:
    unit, size = byte_unit(int(high))
    parts = [label(LEFT, TOP - 12, unit, "end")]
    for tick in round_ticks(high / size, 5):
        parts.append(line("lt-grid", LEFT, y(tick * size), WIDTH - RIGHT, y(tick * size)))
        parts.append(label(LEFT - 8, y(tick * size) + 4, f"{tick:g}", "end"))
    unit, seconds = time_unit(duration_s)
    parts.append(label(WIDTH - RIGHT, HEIGHT - 6, f"time ({unit})", "end"))
    parts += [
        label(x(tick * seconds), HEIGHT - BOTTOM + 18, f"{tick:g}", "middle")
        for tick in round_ticks(duration_s / seconds, 8)
    ]
    return join(*parts)


def _areas(stack: Stack, colours: list[Colour], x: Scale, y: Scale) -> list[Markup]:
    """Return the areas from the top band down. Each reaches to zero and is covered by the next, so no seams show."""
    if not stack.intervals:
        return []
    edges = [x(edge) for edge in stack.edges_s]
    tops = stack.top_bytes
    areas = []
    for number in range(len(stack.bands) - 1, -1, -1):
        band, colour = stack.bands[number], colours[number]
        path = [f"M{edges[0]:g} {y(0):g}"]
        height: float | None = None
        for column, top in enumerate(tops.tolist()):
            if y(top) != height:
                height = y(top)
                path.append(f"H{edges[column]:g}V{height:g}")
        path.append(f"H{edges[-1]:g}V{y(0):g}Z")
        areas.append(
            tag(
                "path",
                {"d": "".join(path), "style": f"fill:var(--{colour.name})", "data-band": number},
                tag("title", None, f"{band.name}: {band.description}"),
            )
        )
        tops = tops - band.live_bytes
    return areas


def _end_of_forward(report: Report, x: Scale) -> Markup:
    place = x(report.timeline.forward_s)
    return join(
        line("lt-phase", place, TOP, place, HEIGHT - BOTTOM),
        label((LEFT + place) / 2, HEIGHT - 6, "forward", "middle", "lt-phase-name"),
        label((place + WIDTH - RIGHT) / 2, HEIGHT - 6, "backward", "middle", "lt-phase-name"),
    )


def _budget_label(report: Report, x: Scale, y: Scale) -> Markup:
    """Return the label of the budget, at the end that is farther from the label of the peak."""
    text, py = f"budget {format_bytes(report.plan.budget_bytes)}", y(report.plan.budget_bytes) - 5
    timeline = report.timeline
    if timeline.intervals and x(timeline.intervals[timeline.peak].start_s) > WIDTH / 2:
        return label(LEFT + 6, py, text, "start", "lt-budget-name")
    return label(WIDTH - RIGHT, py, text, "end", "lt-budget-name")


def _peak(report: Report, x: Scale, y: Scale) -> Markup:
    timeline = report.timeline
    if not timeline.intervals:
        return Markup("")
    at = timeline.intervals[timeline.peak]
    px, py = x(at.start_s + at.duration_s / 2), y(report.predicted_peak_bytes)
    name = f"peak {format_bytes(report.predicted_peak_bytes)}"
    title = tag("title", None, f"{name}: {timeline.describe(timeline.peak)}")
    anchor, beside = ("end", px - 10) if px > WIDTH / 2 else ("start", px + 10)
    return tag(
        "g",
        {"class": "lt-peak"},
        title,
        tag("path", {"d": f"M{px:g} {py:g}l-5 -8h10z"}),
        label(beside, py - 5, name, anchor, "lt-peak-name"),
    )


def _legend(stack: Stack, colours: list[Colour]) -> Markup:
    """Return the legend: bands from the top down, with their bytes at the peak."""
    column = int(stack.top_bytes.argmax()) if stack.intervals else 0
    items = [tag("li", {"class": "lt-soft"}, "Bytes at the peak:")]
    for number in range(len(stack.bands) - 1, -1, -1):
        band = stack.bands[number]
        items.append(
            tag(
                "li",
                {"data-band": number, "title": band.description},
                swatch(colours[number]),
                tag("span", None, band.name),
                tag("b", None, format_bytes(int(band.live_bytes[column]))),
            )
        )
    return tag("ul", {"class": "lt-legend"}, *items)


def _hover_data(report: Report, stack: Stack, colours: list[Colour], x: Scale) -> dict[str, object]:
    timeline = report.timeline
    labels: dict[str, int] = {}
    label_of_column = [labels.setdefault(timeline.describe(shown), len(labels)) for shown in stack.intervals]
    return {
        "edges": [x(edge) for edge in stack.edges_s],
        "starts": [format_time(timeline.intervals[shown].start_s) for shown in stack.intervals],
        "labels": list(labels),
        "label_of_column": label_of_column,
        "bands": [[band.name, colours[k].name, band.live_bytes.tolist()] for k, band in enumerate(stack.bands)],
    }
