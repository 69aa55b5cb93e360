"""A fast plan without a solver: the best of the simple schemes that fits, then improved while it still fits.

Always returns something if one of its schemes fits; says nothing about how much better a plan could be.
Every step is judged by the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .baselines import every_block, keep_heavy_ops, sqrt_segments
from .bits import bits_of, where
from .candidate import Candidate, judged
from .problem import Problem
from .repetition import find_stretches
from .segments import block_cuts, even_cuts, keep_at_cuts
from .simulator import Simulator
from .trials import Trial, Trials

_ROUNDING = 1e-9
"""By how much sums of the same times may differ."""


def solve_greedy(simulator: Simulator, budget_bytes: int, *, deadline: float) -> Candidate | None:
    """The fastest simple scheme that fits, improved."""
    problem = simulator.problem
    movable = frozenset(j for j in range(problem.n_ops) if problem.offloadable[j])
    best: Candidate | None = None
    for name, keep in simple_schemes(problem):
        best = _faster(best, judged(simulator, keep, solver=f"greedy, {name}"), budget_bytes)
        if movable:
            away = judged(
                simulator, keep, offload=movable, room_bytes=budget_bytes, solver=f"greedy, {name}, offloaded"
            )
            best = _faster(best, away, budget_bytes)
        if time.monotonic() > deadline:
            break
    best = _faster(best, _dropped(simulator, budget_bytes), budget_bytes)
    return None if best is None else improve(simulator, best, budget_bytes, deadline=deadline)


class _Changed(NamedTuple):
    """Decisions, and what they cost."""

    keep: Sequence[bool]
    again: frozenset[int]
    offload: frozenset[int]
    extra_s: float


def improve(simulator: Simulator, start: Candidate, budget_bytes: int, *, deadline: float) -> Candidate:
    """Undo recomputes and trips to the store, dearest a byte first, for as long as the plan fits."""
    problem = simulator.problem
    best = _Changed(start.keep, start.again, start.offload, start.extra_s)
    quick = Trials(problem)

    def judge(keep: Sequence[bool], again: frozenset[int], offload: frozenset[int]) -> Candidate | None:
        return judged(simulator, list(keep), again, offload=offload, room_bytes=budget_bytes, solver=start.solver)

    def changed_to(keep: Sequence[bool], again: frozenset[int], offload: frozenset[int]) -> _Changed | None:
        """If it fits and is not slower."""
        found: Trial | Candidate | None
        if offload:
            found = judge(keep, again, offload)
        else:
            kept = problem.obeyed_bits(where(keep))
            # A byte too many costs more than the limit.
            limit_s = best.extra_s * (1 + _ROUNDING)
            found = quick.judge(kept, bits_of(again) & ~kept, budget_bytes, price_s=limit_s + 1, limit_s=limit_s)
        if found is None or found.peak_bytes > budget_bytes or found.extra_s > best.extra_s:
            return None
        return _Changed(keep, again, offload, found.extra_s)

    def without_again(ops: list[int]) -> _Changed | None:
        return changed_to(best.keep, best.again - set(ops), best.offload)

    def here(ops: list[int]) -> _Changed | None:
        return changed_to(best.keep, best.again, best.offload - set(ops))

    def kept(ops: list[int]) -> _Changed | None:
        keep = list(best.keep)
        for j in ops:
            keep[j] = True
        return changed_to(keep, best.again - set(ops), best.offload)

    def cost_a_byte(j: int) -> float:
        size = sum(problem.nbytes[v] for v in problem.outputs[j])
        return -problem.replay_s[j] / max(size, 1)

    changes: list[tuple[Callable[[list[int]], _Changed | None], list[int]]] = [
        (without_again, sorted(best.again, key=cost_a_byte)),
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
    found = judge(best.keep, best.again, best.offload)
    return start if found is None or found.peak_bytes > budget_bytes or found.extra_s > start.extra_s else found


def simple_schemes(problem: Problem) -> Iterator[tuple[str, list[bool]]]:
    """Decisions that need no search, with their names."""
    yield "keep all", problem.keep_all()
    yield "keep matmuls and attention", keep_heavy_ops(problem)
    yield "every block", every_block(problem)
    yield "√n segments", sqrt_segments(problem)
    cuts = block_cuts(problem, find_stretches(problem))
    every = 1
    while every <= len(cuts):
        yield f"cut every {every} blocks", keep_at_cuts(problem, cuts[::every])
        every += 1 + every // 3
    segments = 1
    while segments <= max(1, problem.n_ops // 2):
        yield f"{segments} segments", keep_at_cuts(problem, even_cuts(problem, segments))
        segments += 1 + segments // 2


def _dropped(simulator: Simulator, budget_bytes: int) -> Candidate | None:
    """Keep all, then drop what is cheapest a byte: as little of that order as fits, by bisection."""
    problem = simulator.problem
    sizes = [sum(problem.nbytes[v] for v in outputs) for outputs in problem.outputs]
    order = sorted(
        (j for j in range(problem.n_ops) if sizes[j] and not problem.pinned[j]),
        key=lambda j: problem.replay_s[j] / sizes[j],
    )
    best: Candidate | None = None
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        keep = problem.keep_all()
        for j in order[: middle + 1]:
            keep[j] = False
        tried = judged(simulator, keep, solver="greedy, cheapest a byte")
        if tried is not None and tried.peak_bytes <= budget_bytes:
            best, high = tried, middle
        else:
            low = middle + 1
    return best


def _faster(best: Candidate | None, other: Candidate | None, budget_bytes: int) -> Candidate | None:
    if other is None or other.peak_bytes > budget_bytes:
        return best
    return other if best is None or other.extra_s < best.extra_s else best
