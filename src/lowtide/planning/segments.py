"""Segments of the op list, as in classic checkpointing: values that cross a cut are kept, all others recomputed.

Layers, which users would wrap in `torch.utils.checkpoint`, are found by module path. Cuts are placed where few bytes
cross them, without module names.
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
    """Return, by op, the outermost numbered module that it runs in, such as "transformer.h.3", or ""."""
    found = []
    for op in problem.trace.ops:
        match = _LAYER.match(op.module)
        found.append(match.group(1) if match else "")
    return found


def crossing_bytes(problem: Problem) -> Floats:
    """Return, by op j, the bytes of values that are made by op j or earlier and read after it."""
    change = np.zeros(problem.n_ops + 1)
    for v in range(problem.n_values):
        if problem.producer[v] >= 0 and problem.consumers[v]:
            change[problem.producer[v]] += problem.nbytes[v]
            change[problem.consumers[v][-1]] -= problem.nbytes[v]
    crossing: Floats = np.cumsum(change)[: problem.n_ops]
    return crossing


def block_cuts(problem: Problem, repeats: list[RepeatedBlocks]) -> list[int]:
    """Return one cut for each repeated block, as the op before the cut. Blocks of one run are cut at equal places.

    The place is the one that fewest bytes cross, summed over the blocks.
    """
    crossing = crossing_bytes(problem)
    cuts: list[int] = []
    for repeat in repeats:
        of_run = crossing[repeat.start : repeat.start + repeat.period * repeat.blocks]
        offset = int(of_run.reshape(repeat.blocks, repeat.period).sum(axis=0).argmin())
        cuts += [repeat.start + block * repeat.period + offset for block in range(repeat.blocks)]
    return sorted(cuts)


def even_cuts(problem: Problem, segments: int) -> list[int]:
    """Return cuts into about `segments` segments of equal time, each moved to a nearby op with few crossing bytes."""
    crossing = crossing_bytes(problem)
    end_s = np.cumsum(problem.time_s)
    if not len(end_s) or segments < 2:
        return []
    targets = np.searchsorted(end_s, np.linspace(0, end_s[-1], segments + 1)[1:-1])
    radius = max(1, problem.n_ops // (2 * segments))
    cuts = set()
    for target in targets:
        low = max(0, int(target) - radius)
        cuts.add(low + int(crossing[low : int(target) + radius].argmin()))
    return sorted(cuts)


def keep_at_cuts(problem: Problem, cuts: Iterable[int]) -> list[bool]:
    """Return decisions by op: keep pinned ops and ops with an output that crosses a cut, recompute the rest."""
    keep = problem.recompute_all()
    ordered = np.array(sorted(cuts), dtype=np.int64)
    for v in range(problem.n_values):
        producer = problem.producer[v]
        if producer >= 0 and problem.consumers[v] and not keep[producer]:
            first = int(np.searchsorted(ordered, producer))  # the first cut after the value is made
            if first < len(ordered) and ordered[first] < problem.consumers[v][-1]:
                keep[producer] = True
    return keep
