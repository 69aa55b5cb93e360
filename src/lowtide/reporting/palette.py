"""Colours of bands on light and dark backgrounds: fixed for each category, in order for modules."""

from __future__ import annotations

from dataclasses import dataclass

from .bands import NO_MODULE, REST, Stack


@dataclass(frozen=True)
class Colour:
    """Name of a CSS variable, and its colour on light and on dark backgrounds."""

    name: str
    light: str
    dark: str


_GREY = Colour("grey", "#b4bcc6", "#57616e")
_PALE = Colour("pale", "#d5dae0", "#434b56")
_BY_CATEGORY = {
    "parameters": Colour("parameters", "#5f6f86", "#7d8ea8"),
    "gradients": Colour("gradients", "#d99a2b", "#d9a441"),
    "kept": Colour("kept", "#2f77c2", "#4a92dd"),
    "recomputed": Colour("recomputed", "#23a094", "#2fb5a7"),
    "offloaded": Colour("offloaded", "#8a63c9", "#a283dd"),
    "compressed": Colour("compressed", "#b8679f", "#c97fb3"),
    "temporary": Colour("temporary", "#e3a3ad", "#a8606d"),
    "other": _GREY,
}
MODULE_COLOURS = tuple(
    Colour(f"module-{number}", light, dark)
    for number, (light, dark) in enumerate(
        (
            ("#2f77c2", "#4a92dd"), ("#e08a3c", "#e39a55"), ("#23a094", "#2fb5a7"), ("#c9546b", "#d86a80"),
            ("#7a62c9", "#9582de"), ("#86a836", "#9dbd4e"), ("#c573b8", "#cf86c3"), ("#9a6a45", "#b3835d"),
            ("#4fb3d9", "#6cc3e3"), ("#d8b53a", "#d9bc55"), ("#4f8f5b", "#68a873"), ("#8c4a78", "#ab6996"),
        )
    )
)  # fmt: skip

COLOURS = (*_BY_CATEGORY.values(), _PALE, *MODULE_COLOURS)
"""All colours, without duplicates."""


def colours_by_category(stack: Stack) -> list[Colour]:
    """Return the colour of each band of `stack_by_category`."""
    return [_BY_CATEGORY[band.name] for band in stack.bands]


def colours_by_module(stack: Stack) -> list[Colour]:
    """Return the colour of each band of `stack_by_module`: grey for bands that are not modules."""
    greys = {NO_MODULE: _GREY, REST: _PALE}
    colours = iter(MODULE_COLOURS)
    return [greys[band.name] if band.name in greys else next(colours) for band in stack.bands]
