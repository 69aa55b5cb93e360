"""Building blocks of the SVG charts: size and margins, scales, lines, labels."""

from __future__ import annotations

from .markup import Markup, tag
from .palette import Colour

WIDTH, HEIGHT = 960.0, 340.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 30.0, 42.0


class Scale:
    """Linear map from a quantity to a coordinate."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start = low, start
        self._slope = (end - start) / (high - low) if high > low else 0.0

    def __call__(self, quantity: float) -> float:
        """Return the coordinate, rounded to a tenth of a pixel."""
        return round(self._start + (quantity - self._low) * self._slope, 1)


def label(x: float, y: float, text: str, anchor: str = "start", css_class: str = "lt-label") -> Markup:
    """Return a text element."""
    return tag("text", {"x": round(x, 1), "y": round(y, 1), "text-anchor": anchor, "class": css_class}, text)


def line(css_class: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    """Return a straight line."""
    return tag("line", {"class": css_class, "x1": x1, "y1": y1, "x2": x2, "y2": y2})


def swatch(colour: Colour) -> Markup:
    """Return a patch of colour for a legend."""
    return tag("i", {"class": "lt-swatch", "style": f"background:var(--{colour.name})"})
