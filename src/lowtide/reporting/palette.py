"""The colours of bands, for light and for dark ground. Kinds have theirs by meaning, modules by order."""

from __future__ import annotations

from dataclasses import dataclass

from .bands import NO_MODULE, REST, Stack


@dataclass(frozen=True)
class Colour:
    """One colour for each ground, and its name in a style sheet."""

    name: str
    light: str
    dark: str


_GREY = Colour("grey", "#b4bcc6", "#57616e")
_PALE = Colour("pale", "#d5dae0", "#434b56")
_KINDS = {
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

COLOURS = (*_KINDS.values(), _PALE, *MODULE_COLOURS)
"""All of them, each once."""


def colours_by_kind(stack: Stack) -> list[Colour]:
    """By band of a stack by kind."""
    return [_KINDS[band.name] for band in stack.bands]


def colours_by_module(stack: Stack) -> list[Colour]:
    """By band of a stack by module: greys for what is not a module, then one after the other."""
    greys = {NO_MODULE: _GREY, REST: _PALE}
    following = iter(MODULE_COLOURS)
    return [greys[band.name] if band.name in greys else next(following) for band in stack.bands]
