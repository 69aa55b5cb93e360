"""Stacks of bands as SVG figures that explain themselves without scripts, and carry data for one that does more."""

from __future__ import annotations

from .._units import format_bytes, format_time
from .bands import Stack
from .markup import Markup, data_script, join, tag
from .palette import Colour
from .report import Report
from .ticks import byte_unit, round_ticks, time_unit

WIDTH, HEIGHT = 960.0, 340.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 30.0, 42.0


class Scale:
    """From a quantity to a place on the paper."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start = low, start
        self._slope = (end - start) / (high - low) if high > low else 0.0

    def __call__(self, quantity: float) -> float:
        """Rounded to a tenth, which is less than anybody sees."""
        return round(self._start + (quantity - self._low) * self._slope, 1)


def stack_chart(report: Report, stack: Stack, colours: list[Colour], name: str) -> Markup:
    """One figure: areas, budget, peak, the end of forward, a legend."""
    budget = report.plan.budget_bytes
    high = 1.1 * max(budget, report.predicted_peak_bytes, 1)
    x = Scale(stack.edges_s[0], stack.edges_s[-1], LEFT, WIDTH - RIGHT)
    y = Scale(0, high, HEIGHT - BOTTOM, TOP)
    picture = tag(
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
        _budget_name(report, x, y),
        _peak(report, x, y),
        line("lt-cursor", LEFT, TOP, LEFT, HEIGHT - BOTTOM),
    )
    return tag(
        "figure",
        {"class": "lt-stack"},
        picture,
        _legend(report, stack, colours),
        tag("div", {"class": "lt-tip", "hidden": ""}),
        data_script(_hover_data(report, stack, colours, x)),
    )


def words(x: float, y: float, text: str, anchor: str = "start", kind: str = "lt-words") -> Markup:
    """A piece of text in a picture."""
    return tag("text", {"x": round(x, 1), "y": round(y, 1), "text-anchor": anchor, "class": kind}, text)


def swatch(colour: Colour) -> Markup:
    """A patch of a colour, for legends."""
    return tag("i", {"class": "lt-swatch", "style": f"background:var(--{colour.name})"})


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    """A straight line."""
    return tag("line", {"class": kind, "x1": x1, "y1": y1, "x2": x2, "y2": y2})


def _grid(x: Scale, y: Scale, high: float, duration_s: float) -> Markup:
    unit, size = byte_unit(int(high))
    parts = [words(LEFT, TOP - 12, unit, "end")]
    for tick in round_ticks(high / size, 5):
        parts.append(line("lt-grid", LEFT, y(tick * size), WIDTH - RIGHT, y(tick * size)))
        parts.append(words(LEFT - 8, y(tick * size) + 4, f"{tick:g}", "end"))
    second, seconds = time_unit(duration_s)
    parts.append(words(WIDTH - RIGHT, HEIGHT - 6, f"time, {second}", "end"))
    parts += [
        words(x(tick * seconds), HEIGHT - BOTTOM + 18, f"{tick:g}", "middle")
        for tick in round_ticks(duration_s / seconds, 8)
    ]
    return join(*parts)


def _areas(stack: Stack, colours: list[Colour], x: Scale, y: Scale) -> list[Markup]:
    """From the top band down, each reaching to the ground and covered by the next: so no seams show."""
    if not stack.shown:
        return []
    places = [x(edge) for edge in stack.edges_s]
    tops = stack.top_bytes
    areas = []
    for number in range(len(stack.bands) - 1, -1, -1):
        band, colour = stack.bands[number], colours[number]
        path = [f"M{places[0]:g} {y(0):g}"]
        height: float | None = None
        for column, top in enumerate(tops.tolist()):
            if y(top) != height:
                height = y(top)
                path.append(f"H{places[column]:g}V{height:g}")
        path.append(f"H{places[-1]:g}V{y(0):g}Z")
        areas.append(
            tag(
                "path",
                {"d": "".join(path), "style": f"fill:var(--{colour.name})", "data-band": number},
                tag("title", None, f"{band.name}: {band.about}"),
            )
        )
        tops = tops - band.live_bytes
    return areas


def _end_of_forward(report: Report, x: Scale) -> Markup:
    place = x(report.timeline.forward_s)
    return join(
        line("lt-phase", place, TOP, place, HEIGHT - BOTTOM),
        words((LEFT + place) / 2, HEIGHT - 6, "forward", "middle", "lt-phase-name"),
        words((place + WIDTH - RIGHT) / 2, HEIGHT - 6, "backward", "middle", "lt-phase-name"),
    )


def _budget_name(report: Report, x: Scale, y: Scale) -> Markup:
    """At the end that is further from the name of the peak."""
    text, py = f"budget {format_bytes(report.plan.budget_bytes)}", y(report.plan.budget_bytes) - 5
    timeline = report.timeline
    if timeline.moments and x(timeline.moments[timeline.peak].start_s) > WIDTH / 2:
        return words(LEFT + 6, py, text, "start", "lt-budget-name")
    return words(WIDTH - RIGHT, py, text, "end", "lt-budget-name")


def _peak(report: Report, x: Scale, y: Scale) -> Markup:
    timeline = report.timeline
    if not timeline.moments:
        return Markup("")
    at = timeline.moments[timeline.peak]
    px, py = x(at.start_s + at.duration_s / 2), y(report.predicted_peak_bytes)
    text = f"peak {format_bytes(report.predicted_peak_bytes)}"
    title = tag("title", None, f"{text}: {timeline.describe(timeline.peak)}")
    anchor, beside = ("end", px - 10) if px > WIDTH / 2 else ("start", px + 10)
    return tag(
        "g",
        {"class": "lt-peak"},
        title,
        tag("path", {"d": f"M{px:g} {py:g}l-5 -8h10z"}),
        words(beside, py - 5, text, anchor, "lt-peak-name"),
    )


def _legend(report: Report, stack: Stack, colours: list[Colour]) -> Markup:
    """Bands from the top down, with their bytes at the peak."""
    column = int(stack.top_bytes.argmax()) if stack.shown else 0
    items = [tag("li", {"class": "lt-soft"}, "at the peak:")]
    for number in range(len(stack.bands) - 1, -1, -1):
        band = stack.bands[number]
        items.append(
            tag(
                "li",
                {"data-band": number, "title": band.about},
                swatch(colours[number]),
                tag("span", None, band.name),
                tag("b", None, format_bytes(int(band.live_bytes[column]))),
            )
        )
    return tag("ul", {"class": "lt-legend"}, *items)


def _hover_data(report: Report, stack: Stack, colours: list[Colour], x: Scale) -> dict[str, object]:
    timeline = report.timeline
    labels: dict[str, int] = {}
    label_of_column = [labels.setdefault(timeline.describe(moment), len(labels)) for moment in stack.shown]
    return {
        "edges": [x(edge) for edge in stack.edges_s],
        "starts": [format_time(timeline.moments[moment].start_s) for moment in stack.shown],
        "labels": list(labels),
        "label_of_column": label_of_column,
        "bands": [[band.name, colours[k].name, band.live_bytes.tolist()] for k, band in enumerate(stack.bands)],
    }
