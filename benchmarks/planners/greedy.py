"""Greedy planning, as a baseline: the best of the simple schemes that fits, then improved while it still fits."""

from __future__ import annotations

import time

from lowtide.planning.candidate import Candidate, judged
from lowtide.planning.improve import improve, simple_schemes
from lowtide.planning.simulator import Simulator


def solve_greedy(simulator: Simulator, budget_bytes: int, *, deadline: float) -> Candidate | None:
    """The fastest simple scheme that fits, improved."""
    problem = simulator.problem
    movable = frozenset(j for j in range(problem.n_ops) if problem.offloadable[j])
    best: Candidate | None = None
    for name, keep in simple_schemes(problem):
        best = _faster(best, judged(simulator, keep, solver=f"greedy, {name}"), budget_bytes)
        if movable:
            away = judged(
                simulator, keep, offload=movable, limit_bytes=budget_bytes, solver=f"greedy, {name}, offloaded"
            )
            best = _faster(best, away, budget_bytes)
        if time.monotonic() > deadline:
            break
    best = _faster(best, _dropped(simulator, budget_bytes), budget_bytes)
    return None if best is None else improve(simulator, best, budget_bytes, deadline=deadline)


def _dropped(simulator: Simulator, budget_bytes: int) -> Candidate | None:
    """Keep all, then drop what is cheapest a byte: as little of that order as fits, by bisection."""
    problem = simulator.problem
    sizes = [sum(problem.nbytes[v] for v in outputs) for outputs in problem.outputs]
    order = sorted(
        (j for j in range(problem.n_ops) if sizes[j] and not problem.pinned[j]),
        key=lambda j: problem.replay_overhead_s[j] / sizes[j],
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
