"""Live bytes over the step as a stack of bands, by kind or by module, ready to be drawn.

Modules are merged along their paths until few enough are left to be told apart; what is largest is split
furthest. Many moments become few columns; each shows the fullest moment in it, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .timeline import KINDS, Bytes, Timeline

OUTSIDE = "(outside of modules)"
NO_MODULE = "parameters, gradients, …"
REST = "other modules"
_MOST_BANDS = 12
_WORTH_SPLITTING = 0.08
"""Share of all bytes above which a band is split into the modules inside it."""


_WORTH_SHOWING = 0.005
"""Share of all bytes below which several bands become one."""

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Band:
    """One layer of a stack."""

    name: str
    about: str
    """What is counted in it, in words."""
    live_bytes: Bytes
    """By column."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Bands from the bottom to the top, over columns of time."""

    edges_s: tuple[float, ...]
    """Where columns begin, and where the last ends."""
    shown: tuple[int, ...]
    """By column: the moment that it shows."""
    bands: tuple[Band, ...]

    @property
    def top_bytes(self) -> Bytes:
        """By column: all bands together."""
        total: Bytes = np.sum([band.live_bytes for band in self.bands], axis=0, dtype=np.int64)
        return total


def stack_by_kind(timeline: Timeline, columns: int = 480) -> Stack:
    """Who holds the bytes: parameters, gradients, kept values, ..."""
    edges_s, shown = _columns(timeline, columns)
    bands = [
        Band(name, about, timeline.kind_bytes[list(shown), number])
        for number, (name, about) in enumerate(KINDS.items())
    ]
    return Stack(edges_s, shown, tuple(band for band in bands if band.live_bytes.any()))


def stack_by_module(timeline: Timeline, columns: int = 480) -> Stack:
    """Which modules made the values that are alive; at the bottom what is of no module."""
    edges_s, shown = _columns(timeline, columns)
    rows = list(shown)
    weights = dict(zip(timeline.modules, timeline.module_bytes[rows].sum(axis=0).tolist(), strict=True))
    bands = [Band(NO_MODULE, "everything that is not a value made by an op of forward", timeline.other_bytes[rows])]
    for name, members in merge_modules(weights):
        numbers = [timeline.modules.index(member) for member in members]
        live_bytes = timeline.module_bytes[rows][:, numbers].sum(axis=1)
        about = f"values made in {', '.join(member or OUTSIDE for member in members[:4])}"
        bands.append(Band(name, about + (", …" if len(members) > 4 else ""), live_bytes))
    return Stack(edges_s, shown, tuple(band for band in bands if band.live_bytes.any()))


def merge_modules(weights: dict[str, int], most: int = _MOST_BANDS) -> list[tuple[str, list[str]]]:
    """Groups of modules by the name to show: at most `most`, and one for the rest, in the order given.

    >>> merge_modules({"embed": 1, "h.*.attn": 50, "h.*.mlp.up": 2, "h.*.mlp.act": 2})
    [('embed', ['embed']), ('h.*.attn', ['h.*.attn']), ('h.*.mlp', ['h.*.mlp.up', 'h.*.mlp.act'])]
    """
    total = sum(weights.values())
    groups = _children(list(weights), 0)
    whole: set[Path] = set()

    def weight(group: Path) -> int:
        return sum(weights[name] for name in groups[group])

    while candidates := [g for g in groups if g not in whole and weight(g) > _WORTH_SPLITTING * total]:
        largest = max(candidates, key=weight)
        parts = _children(groups[largest], len(largest))
        whole.add(largest)
        if len(groups) - 1 + len(parts) <= most:
            del groups[largest]
            groups.update(parts)
    by_weight = sorted(groups, key=weight, reverse=True)
    small = [g for k, g in enumerate(by_weight) if k >= most or weight(g) < _WORTH_SHOWING * total]
    place = {name: number for number, name in enumerate(weights)}
    ordered = sorted((g for g in groups if len(small) == 1 or g not in small), key=lambda g: place[groups[g][0]])
    merged = [((groups[g][0] if len(groups[g]) == 1 else ".".join(g)) or OUTSIDE, groups[g]) for g in ordered]
    if len(small) > 1:
        merged.append((REST, [name for g in small for name in groups[g]]))
    return merged


def _children(names: Iterable[str], depth: int) -> dict[Path, list[str]]:
    """Modules by their path cut after one part more than `depth`."""
    groups: dict[Path, list[str]] = {}
    for name in names:
        path = tuple(name.split(".")) if name else ()
        groups.setdefault(path[: depth + 1], []).append(name)
    return groups


def _columns(timeline: Timeline, columns: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Edges in time, and by column the fullest moment that touches it."""
    moments = timeline.moments
    if not moments:
        return (0.0, 0.0), ()
    starts = np.array([moment.start_s for moment in moments])
    ends = np.array([moment.start_s + moment.duration_s for moment in moments])
    if len(moments) <= columns or timeline.duration_s <= 0:
        return (*starts.tolist(), float(ends[-1])), tuple(range(len(moments)))
    live = timeline.live_bytes
    edges = np.linspace(0.0, timeline.duration_s, columns + 1)
    first = np.minimum(np.searchsorted(ends, edges[:-1], side="left"), len(moments) - 1)
    last = np.maximum(np.searchsorted(starts, edges[1:], side="right"), first + 1)
    shown = [int(low + live[low:high].argmax()) for low, high in zip(first, last, strict=True)]
    return tuple(edges.tolist()), tuple(shown)
