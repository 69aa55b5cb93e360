"""Data of a stacked area chart: live bytes over the step, by category or by module.

Modules are merged along their paths so that at most about a dozen bands remain; the largest modules are split
furthest. Intervals are merged into columns. A column shows its interval with the most live bytes, so that no
peak is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .timeline import CATEGORIES, Bytes, Timeline

OUTSIDE = "(outside modules)"
NO_MODULE = "parameters, gradients, …"
REST = "other modules"
_MAX_BANDS = 12
_SPLIT_SHARE = 0.08
"""Share of all bytes above which a band is split into its submodules."""
_MERGE_SHARE = 0.005
"""Share of all bytes below which bands are merged into `REST`."""

Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Band:
    """One layer of a stack."""

    name: str
    description: str
    live_bytes: Bytes
    """One number for each column."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Bands from the bottom to the top, over columns of time."""

    edges_s: tuple[float, ...]
    """Start of each column, and the end of the last."""
    intervals: tuple[int, ...]
    """Index of the interval that each column shows."""
    bands: tuple[Band, ...]

    @property
    def top_bytes(self) -> Bytes:
        """Sum of all bands in each column."""
        total: Bytes = np.sum([band.live_bytes for band in self.bands], axis=0, dtype=np.int64)
        return total


def stack_by_category(timeline: Timeline, columns: int = 480) -> Stack:
    """Return the bands of `CATEGORIES`: parameters, gradients, kept values, ..."""
    edges_s, shown = _columns(timeline, columns)
    bands = [
        Band(name, description, timeline.category_bytes[list(shown), number])
        for number, (name, description) in enumerate(CATEGORIES.items())
    ]
    return Stack(edges_s, shown, tuple(band for band in bands if band.live_bytes.any()))


def stack_by_module(timeline: Timeline, columns: int = 480) -> Stack:
    """Return one band for each group of modules, above a band for bytes that belong to no module."""
    edges_s, shown = _columns(timeline, columns)
    rows = list(shown)
    weights = dict(zip(timeline.modules, timeline.module_bytes[rows].sum(axis=0).tolist(), strict=True))
    bands = [Band(NO_MODULE, "memory other than the outputs of forward ops", timeline.other_bytes[rows])]
    for name, members in merge_modules(weights):
        numbers = [timeline.modules.index(member) for member in members]
        live_bytes = timeline.module_bytes[rows][:, numbers].sum(axis=1)
        description = f"outputs of {', '.join(member or OUTSIDE for member in members[:4])}"
        bands.append(Band(name, description + (", …" if len(members) > 4 else ""), live_bytes))
    return Stack(edges_s, shown, tuple(band for band in bands if band.live_bytes.any()))


def merge_modules(weights: dict[str, int], max_groups: int = _MAX_BANDS) -> list[tuple[str, list[str]]]:
    """Return groups of modules by displayed name: at most `max_groups` and one for the rest, in the given order.

    >>> merge_modules({"embed": 1, "h.*.attn": 50, "h.*.mlp.up": 2, "h.*.mlp.act": 2})
    [('embed', ['embed']), ('h.*.attn', ['h.*.attn']), ('h.*.mlp', ['h.*.mlp.up', 'h.*.mlp.act'])]
    """
    total = sum(weights.values())
    groups = _children(list(weights), 0)
    visited: set[Path] = set()

    def weight(group: Path) -> int:
        return sum(weights[name] for name in groups[group])

    while candidates := [g for g in groups if g not in visited and weight(g) > _SPLIT_SHARE * total]:
        largest = max(candidates, key=weight)
        parts = _children(groups[largest], len(largest))
        visited.add(largest)
        if len(groups) - 1 + len(parts) <= max_groups:
            del groups[largest]
            groups.update(parts)
    by_weight = sorted(groups, key=weight, reverse=True)
    small = [g for k, g in enumerate(by_weight) if k >= max_groups or weight(g) < _MERGE_SHARE * total]
    position = {name: number for number, name in enumerate(weights)}
    ordered = sorted((g for g in groups if len(small) == 1 or g not in small), key=lambda g: position[groups[g][0]])
    merged = [((groups[g][0] if len(groups[g]) == 1 else ".".join(g)) or OUTSIDE, groups[g]) for g in ordered]
    if len(small) > 1:
        merged.append((REST, [name for g in small for name in groups[g]]))
    return merged


def _children(names: Iterable[str], depth: int) -> dict[Path, list[str]]:
    """Return the modules grouped by the first `depth + 1` parts of their paths."""
    groups: dict[Path, list[str]] = {}
    for name in names:
        path = tuple(name.split(".")) if name else ()
        groups.setdefault(path[: depth + 1], []).append(name)
    return groups


def _columns(timeline: Timeline, columns: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the edges of the columns, and for each column its overlapping interval with the most live bytes."""
    intervals = timeline.intervals
    if not intervals:
        return (0.0, 0.0), ()
    starts = np.array([interval.start_s for interval in intervals])
    ends = np.array([interval.start_s + interval.duration_s for interval in intervals])
    if len(intervals) <= columns or timeline.duration_s <= 0:
        return (*starts.tolist(), float(ends[-1])), tuple(range(len(intervals)))
    live = timeline.live_bytes
    edges = np.linspace(0.0, timeline.duration_s, columns + 1)
    first = np.minimum(np.searchsorted(ends, edges[:-1], side="left"), len(intervals) - 1)
    last = np.maximum(np.searchsorted(starts, edges[1:], side="right"), first + 1)
    shown = [int(low + live[low:high].argmax()) for low, high in zip(first, last, strict=True)]
    return tuple(edges.tolist()), tuple(shown)
