"""Common checkpointing rules as decisions by op, for comparison with plans.

No rule considers the peak, so the decisions may exceed any budget. Pinned ops are always kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from .problem import Problem
from .repetition import find_repeated_blocks
from .segments import block_cuts, even_cuts, layers_of

_HEAVY = re.compile(r"\b(?:add|ba)?(?:b?mm|baddbmm|addmv|linear|convolution)\b|attention|matmul|conv\d?d?\b")


def keep_all(problem: Problem) -> list[bool]:
    """Keep everything, as plain PyTorch does."""
    return problem.keep_all()


def recompute_all(problem: Problem) -> list[bool]:
    """Recompute everything."""
    return problem.recompute_all()


def every_block(problem: Problem) -> list[bool]:
    """Keep the inputs of layers and everything outside layers: `torch.utils.checkpoint` around every layer."""
    return _checkpointed(problem, _segment_names(problem, 1))


def sqrt_segments(problem: Problem) -> list[bool]:
    """Keep the inputs of √n segments of layers: `checkpoint_sequential`."""
    layers = len({name for name in _segment_names(problem, 1) if name})
    return _checkpointed(problem, _segment_names(problem, max(1, math.isqrt(max(1, layers)))))


def keep_heavy_ops(problem: Problem) -> list[bool]:
    """Keep matrix products, convolutions and attention too: selective checkpointing of every layer."""
    keep = every_block(problem)
    for j, op in enumerate(problem.trace.ops):
        if _HEAVY.search(op.name.removeprefix("aten.").split(".")[0]):
            keep[j] = True
    return keep


def knapsack(problem: Problem, budget_bytes: int) -> list[bool]:
    """Keep the saved values with the highest op time per byte, as far as the sum of their bytes fits.

    This is the rule of the partitioner in `torch.compile`. Other bytes count with their maximum in backward.
    """
    keep = problem.recompute_all()
    other_bytes = max((unpack.other_bytes for unpack in problem.trace.unpacks), default=0)
    free_bytes = budget_bytes - other_bytes
    saved_bytes = [sum(problem.nbytes[v] for v in outputs if problem.saved[v]) for outputs in problem.outputs]
    free_bytes -= sum(size for size, kept in zip(saved_bytes, keep, strict=True) if kept)
    candidates = [j for j in range(problem.n_ops) if saved_bytes[j] and not keep[j]]
    for j in sorted(candidates, key=lambda j: -problem.time_s[j] / saved_bytes[j]):
        if saved_bytes[j] <= free_bytes:
            keep[j] = True
            free_bytes -= saved_bytes[j]
    return keep


BASELINES: dict[str, Callable[[Problem], list[bool]]] = {
    "keep all": keep_all,
    "recompute all": recompute_all,
    "every block": every_block,
    "√n segments": sqrt_segments,
    "keep matmuls and attention": keep_heavy_ops,
}
"""The rules that need no budget, by their names in tables."""


def _segment_names(problem: Problem, layers_per_segment: int) -> list[str]:
    """Return, by op, the number of its segment of layers, or "" outside layers.

    Without numbered modules, repeated blocks of ops count as layers.
    """
    names = layers_of(problem)
    if not any(names):
        cuts = block_cuts(problem, find_repeated_blocks(problem)) or even_cuts(problem, math.isqrt(problem.n_ops))
        segment, names = 0, []
        for j in range(problem.n_ops):
            names.append(f"segment.{segment}")
            segment += j in cuts
    order = {name: i for i, name in enumerate(dict.fromkeys(name for name in names if name))}
    return [f"{order[name] // layers_per_segment}" if name else "" for name in names]


def _checkpointed(problem: Problem, segments: list[str]) -> list[bool]:
    """Keep pinned ops, ops outside segments, and ops with an output that is read outside their segment."""
    keep = list(problem.pinned)
    for j in range(problem.n_ops):
        readers = (w for v in problem.outputs[j] for w in problem.consumers[v])
        if not segments[j] or any(segments[w] != segments[j] for w in readers):
            keep[j] = True
    return keep
