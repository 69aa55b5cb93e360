"""What people do today, as decisions for the same simulator: the plans to beat.

Each is the rule as its users know it, translated to ops; none looks at the peak. They always return
decisions, which need not fit any budget.
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
    """Plain PyTorch."""
    return problem.keep_all()


def recompute_all(problem: Problem) -> list[bool]:
    """Everything from the sources again (what is pinned is kept)."""
    return problem.recompute_all()


def every_block(problem: Problem) -> list[bool]:
    """`torch.utils.checkpoint` around every layer: keep what enters layers, and everything outside of them."""
    return _checkpointed(problem, _segment_names(problem, 1))


def sqrt_segments(problem: Problem) -> list[bool]:
    """`checkpoint_sequential` with √n segments of layers."""
    layers = len({name for name in _segment_names(problem, 1) if name})
    return _checkpointed(problem, _segment_names(problem, max(1, math.isqrt(max(1, layers)))))


def keep_heavy_ops(problem: Problem) -> list[bool]:
    """Selective checkpointing of every layer that keeps matrix products, convolutions and attention."""
    keep = every_block(problem)
    for j, op in enumerate(problem.trace.ops):
        if _HEAVY.search(op.name.removeprefix("aten.").split(".")[0]):
            keep[j] = True
    return keep


def knapsack(problem: Problem, budget_bytes: int) -> list[bool]:
    """Keep the saved values that cost most time a byte while their sum fits, as compilers' partitioners do."""
    keep = problem.recompute_all()
    fixed = max((unpack.other_bytes for unpack in problem.trace.unpacks), default=0)
    memory_budget = budget_bytes - fixed
    saved_bytes = [sum(problem.nbytes[v] for v in outputs if problem.saved[v]) for outputs in problem.outputs]
    memory_budget -= sum(size for size, kept in zip(saved_bytes, keep, strict=True) if kept)
    worth = [j for j in range(problem.n_ops) if saved_bytes[j] and not keep[j]]
    for j in sorted(worth, key=lambda j: -problem.time_s[j] / saved_bytes[j]):
        if saved_bytes[j] <= memory_budget:
            keep[j] = True
            memory_budget -= saved_bytes[j]
    return keep


BASELINES: dict[str, Callable[[Problem], list[bool]]] = {
    "keep all": keep_all,
    "recompute all": recompute_all,
    "every block": every_block,
    "√n segments": sqrt_segments,
    "keep matmuls and attention": keep_heavy_ops,
}
"""Those that need no budget, by the name under which a table shows them; `knapsack` needs one."""


def _segment_names(problem: Problem, layers_a_segment: int) -> list[str]:
    """By op: the segment of layers that it is in, or "" outside of any."""
    names = layers_of(problem)
    if not any(names):
        cuts = block_cuts(problem, find_repeated_blocks(problem)) or even_cuts(problem, math.isqrt(problem.n_ops))
        segment, names = 0, []
        for j in range(problem.n_ops):
            names.append(f"segment.{segment}")
            segment += j in cuts
    order = {name: i for i, name in enumerate(dict.fromkeys(name for name in names if name))}
    return [f"{order[name] // layers_a_segment}" if name else "" for name in names]


def _checkpointed(problem: Problem, segments: list[str]) -> list[bool]:
    """Keep what is outside of all segments, and what leaves one for another place."""
    keep = list(problem.pinned)
    for j in range(problem.n_ops):
        readers = (w for v in problem.outputs[j] for w in problem.consumers[v])
        if not segments[j] or any(segments[w] != segments[j] for w in readers):
            keep[j] = True
    return keep
