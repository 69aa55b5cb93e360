"""Cutting the op stream into segments: what crosses a cut is kept, everything between is recomputed.

The shape of every classic checkpointing scheme. Layers are found by module path (what
`torch.utils.checkpoint` would wrap), cuts by the bytes that cross them (no names needed).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from .problem import Problem
from .repetition import RepeatedBlocks
from .rows import Floats

_LAYER = re.compile(r"^((?:[^.]+\.)*?\d+)(?:\.|$)")


def layers_of(problem: Problem) -> list[str]:
    """By op: the outermost numbered module that it runs in ("transformer.h.3"), or "" outside of any."""
    found = []
    for op in problem.trace.ops:
        match = _LAYER.match(op.module)
        found.append(match.group(1) if match else "")
    return found


def crossing_bytes(problem: Problem) -> Floats:
    """By op j: bytes of values that are made by op j or before and read after it."""
    change = np.zeros(problem.n_ops + 1)
    for v in range(problem.n_values):
        if problem.producer[v] >= 0 and problem.consumers[v]:
            change[problem.producer[v]] += problem.nbytes[v]
            change[problem.consumers[v][-1]] -= problem.nbytes[v]
    crossing: Floats = np.cumsum(change)[: problem.n_ops]
    return crossing


def block_cuts(problem: Problem, repeats: list[RepeatedBlocks]) -> list[int]:
    """The narrowest place of every repeated block: op after which to cut."""
    crossing = crossing_bytes(problem)
    cuts: list[int] = []
    for repeat in repeats:
        # The same place in every block: the narrowest on the whole.
        table = crossing[repeat.start : repeat.start + repeat.period * repeat.blocks]
        offset = int(table.reshape(repeat.blocks, repeat.period).sum(axis=0).argmin())
        cuts += [repeat.start + block * repeat.period + offset for block in range(repeat.blocks)]
    return sorted(cuts)


def even_cuts(problem: Problem, segments: int) -> list[int]:
    """Cuts into about this many segments of equal time, each moved to the narrowest place nearby."""
    crossing = crossing_bytes(problem)
    clock = np.cumsum(problem.time_s)
    if not len(clock) or segments < 2:
        return []
    targets = np.searchsorted(clock, np.linspace(0, clock[-1], segments + 1)[1:-1])
    radius = max(1, problem.n_ops // (2 * segments))
    cuts = set()
    for target in targets:
        low = max(0, int(target) - radius)
        cuts.add(low + int(crossing[low : int(target) + radius].argmin()))
    return sorted(cuts)


def keep_at_cuts(problem: Problem, cuts: Iterable[int]) -> list[bool]:
    """Keep what crosses a cut and what is pinned; recompute the rest."""
    keep = problem.recompute_all()
    ordered = sorted(cuts)
    places = np.array(ordered, dtype=np.int64)
    for v in range(problem.n_values):
        producer = problem.producer[v]
        if producer >= 0 and problem.consumers[v] and not keep[producer]:
            # The first cut at or after its maker, if it is read beyond that.
            first = int(np.searchsorted(places, producer))
            if first < len(places) and places[first] < problem.consumers[v][-1]:
                keep[producer] = True
    return keep
