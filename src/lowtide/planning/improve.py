"""Improve a plan that fits: undo recomputes and offloads while it still fits. Also the simple schemes to start from.

Every change is judged by the simulator, or by its fast form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .baselines import every_block, keep_heavy_ops, sqrt_segments
from .bits import bits_of, where
from .candidate import Candidate, judged
from .fast_judge import FastJudge, FastResult
from .problem import Problem
from .repetition import find_repeated_blocks
from .segments import block_cuts, even_cuts, keep_at_cuts
from .simulator import Simulator

_ROUNDING = 1e-9
"""By how much sums of the same times may differ."""


class _Changed(NamedTuple):
    """Decisions, and what they cost."""

    keep: Sequence[bool]
    released: frozenset[int]
    offload: frozenset[int]
    extra_s: float


def improve(simulator: Simulator, start: Candidate, budget_bytes: int, *, deadline: float) -> Candidate:
    """Undo recomputes and trips to the store, dearest a byte first, for as long as the plan fits."""
    problem = simulator.problem
    best = _Changed(start.keep, start.released, start.offload, start.extra_s)
    quick = FastJudge(problem)

    def judge(keep: Sequence[bool], released: frozenset[int], offload: frozenset[int]) -> Candidate | None:
        return judged(simulator, list(keep), released, offload=offload, limit_bytes=budget_bytes, solver=start.solver)

    def changed_to(keep: Sequence[bool], released: frozenset[int], offload: frozenset[int]) -> _Changed | None:
        """If it fits and is not slower."""
        found: FastResult | Candidate | None
        if offload:
            found = judge(keep, released, offload)
        else:
            kept = problem.effective_bits(where(keep))
            # A byte too many costs more than the limit.
            limit_s = best.extra_s * (1 + _ROUNDING)
            found = quick.judge(kept, bits_of(released) & ~kept, budget_bytes, price_s=limit_s + 1, limit_s=limit_s)
        if found is None or found.peak_bytes > budget_bytes or found.extra_s > best.extra_s:
            return None
        return _Changed(keep, released, offload, found.extra_s)

    def without_again(ops: list[int]) -> _Changed | None:
        return changed_to(best.keep, best.released - set(ops), best.offload)

    def here(ops: list[int]) -> _Changed | None:
        return changed_to(best.keep, best.released, best.offload - set(ops))

    def kept(ops: list[int]) -> _Changed | None:
        keep = list(best.keep)
        for j in ops:
            keep[j] = True
        return changed_to(keep, best.released - set(ops), best.offload)

    def cost_a_byte(j: int) -> float:
        size = sum(problem.nbytes[v] for v in problem.outputs[j])
        return -problem.replay_overhead_s[j] / max(size, 1)

    changes: list[tuple[Callable[[list[int]], _Changed | None], list[int]]] = [
        (without_again, sorted(best.released, key=cost_a_byte)),
        (here, sorted(best.offload)),
        (kept, sorted((j for j in range(problem.n_ops) if not best.keep[j]), key=cost_a_byte)),
    ]
    for change, ops in changes:
        position, size = 0, len(ops)
        while position < len(ops) and time.monotonic() < deadline:
            # Many at once where that works, one by one where it does not.
            size = max(1, min(size, len(ops) - position))
            changed = change(ops[position : position + size])
            if changed is not None:
                best = changed
                position += size
                size *= 2
            elif size > 1:
                size //= 2
            else:
                position += 1
    found = judge(best.keep, best.released, best.offload)
    return start if found is None or found.peak_bytes > budget_bytes or found.extra_s > start.extra_s else found


def simple_schemes(problem: Problem) -> Iterator[tuple[str, list[bool]]]:
    """Decisions that need no search, with their names."""
    yield "keep all", problem.keep_all()
    yield "keep matmuls and attention", keep_heavy_ops(problem)
    yield "every block", every_block(problem)
    yield "√n segments", sqrt_segments(problem)
    cuts = block_cuts(problem, find_repeated_blocks(problem))
    every = 1
    while every <= len(cuts):
        yield f"cut every {every} blocks", keep_at_cuts(problem, cuts[::every])
        every += 1 + every // 3
    segments = 1
    while segments <= max(1, problem.n_ops // 2):
        yield f"{segments} segments", keep_at_cuts(problem, even_cuts(problem, segments))
        segments += 1 + segments // 2
