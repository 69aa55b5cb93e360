"""A frontier as SVG: plans, lower bound, simple schemes, and the plan of the report."""

from __future__ import annotations

import math

from .._units import format_bytes
from .frontier import FRONTIER_TITLE, Frontier, Point
from .markup import Markup, join, tag
from .palette import MODULE_COLOURS
from .report import Report
from .svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Scale, label, line
from .ticks import byte_unit, ratio_ticks, round_ticks

_SHAPES = (
    "M-5-5h10v10h-10z",
    "M0-7l7 7-7 7-7-7z",
    "M0-6l6.5 11h-13z",
    "M0 6l6.5-11h-13z",
    "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z",
)
"""SVG paths centred on the origin: square, diamond, two triangles, cross."""


def frontier_chart(report: Report, frontier: Frontier) -> Markup:
    """Return the figure. Times are ratios to the plain step, on a logarithmic axis."""
    points = (*frontier.points, *frontier.baselines)
    chosen = Point(
        report.plan.budget_bytes, report.predicted_peak_bytes, report.predicted_step_s, report.plan.bound_step_s,
        f"this plan ({report.plan.solver})",
    )  # fmt: skip
    plain_s = frontier.plain_step_s
    slowest = 1.05 * max(point.step_s / plain_s for point in (*points, chosen))
    widest = 1.04 * max(*(point.peak_bytes for point in points), chosen.peak_bytes, report.plan.budget_bytes)
    x = Scale(0, widest, LEFT, WIDTH - RIGHT)
    log_y = Scale(-0.02 * math.log(slowest), math.log(slowest), HEIGHT - BOTTOM, TOP)

    def place(point: Point, seconds: float) -> tuple[float, float]:
        return x(point.peak_bytes), log_y(math.log(seconds / plain_s))

    def marker(point: Point, css_class: str, shape: Markup) -> Markup:
        px, py = place(point, point.step_s)
        title = f"{point.name}: {format_bytes(point.peak_bytes)}, × {point.step_s / plain_s:.3f}"
        return tag(
            "g", {"class": css_class, "transform": f"translate({px:g} {py:g})"}, tag("title", None, title), shape
        )

    svg = tag(
        "svg",
        {
            "viewBox": f"0 0 {WIDTH:g} {HEIGHT:g}",
            "role": "img",
            "aria-label": f"{FRONTIER_TITLE}: {len(frontier.points)} plans, {len(frontier.baselines)} schemes",
        },
        _grid(x, log_y, widest, slowest),
        line("lt-budget", x(report.plan.budget_bytes), TOP, x(report.plan.budget_bytes), HEIGHT - BOTTOM),
        _polyline("lt-bound", [place(point, point.bound_step_s) for point in frontier.points]),
        _polyline("lt-plans", [place(point, point.step_s) for point in frontier.points]),
        *(marker(point, "lt-plan", tag("circle", {"r": 3.5})) for point in frontier.points),
        *(marker(point, "lt-scheme", _scheme(number)) for number, point in enumerate(frontier.baselines)),
        marker(chosen, "lt-chosen", tag("circle", {"r": 8})),
    )
    return tag("figure", {"class": "lt-frontier"}, svg, _legend(frontier))


def _scheme(number: int) -> Markup:
    colour = MODULE_COLOURS[(number + 1) % len(MODULE_COLOURS)]
    return tag("path", {"d": _SHAPES[number % len(_SHAPES)], "style": f"fill:var(--{colour.name})"})


def _polyline(css_class: str, places: list[tuple[float, float]]) -> Markup:
    return tag("polyline", {"class": css_class, "points": " ".join(f"{px:g},{py:g}" for px, py in places)})


def _grid(x: Scale, log_y: Scale, widest: float, slowest: float) -> Markup:
    unit, size = byte_unit(int(widest))
    parts = [
        label(LEFT - 48, TOP - 12, "step time (plain = 1)"),
        label(WIDTH - RIGHT, HEIGHT - 6, f"peak bytes ({unit})", "end"),
    ]
    for ratio in ratio_ticks(slowest):
        py = log_y(math.log(ratio))
        parts += [line("lt-grid", LEFT, py, WIDTH - RIGHT, py), label(LEFT - 8, py + 4, f"× {ratio:g}", "end")]
    for tick in round_ticks(widest / size, 8):
        parts.append(label(x(tick * size), HEIGHT - BOTTOM + 18, f"{tick:g}", "middle"))
    return join(*parts)


def _legend(frontier: Frontier) -> Markup:
    def entry(css_class: str, shape: Markup, name: str) -> Markup:
        sample = tag("svg", {"class": "lt-sample", "viewBox": "-12 -9 24 18"}, tag("g", {"class": css_class}, shape))
        return tag("li", None, sample, tag("span", None, name))

    return tag(
        "ul",
        {"class": "lt-legend"},
        entry("lt-chosen", tag("circle", {"r": 7}), "this plan"),
        entry("lt-plan", tag("circle", {"r": 3.5}), "plans for other budgets"),
        entry("lt-sampled", line("lt-bound", -12, 0, 12, 0), "proven lower bound"),
        entry("lt-sampled", line("lt-budget", 0, -9, 0, 9), "budget"),
        *(entry("lt-scheme", _scheme(number), point.name) for number, point in enumerate(frontier.baselines)),
    )
