"""Greedy planning: the fastest simple scheme that fits, then local improvement. A baseline."""

from __future__ import annotations

import time

from lowtide.planning.candidate import Candidate, judge_decisions
from lowtide.planning.improve import improve, simple_schemes
from lowtide.planning.simulator import Simulator


def solve_greedy(simulator: Simulator, budget_bytes: int, *, deadline: float) -> Candidate | None:
    """Return the fastest simple scheme that fits, improved; None if no scheme fits."""
    problem = simulator.problem
    offloadable = frozenset(j for j in range(problem.n_ops) if problem.offloadable[j])
    best: Candidate | None = None
    for name, keep in simple_schemes(problem):
        best = _faster(best, judge_decisions(simulator, keep, solver=f"greedy, {name}"), budget_bytes)
        if offloadable:
            offloaded = judge_decisions(
                simulator, keep, offload=offloadable, limit_bytes=budget_bytes, solver=f"greedy, {name}, offloaded"
            )
            best = _faster(best, offloaded, budget_bytes)
        if time.monotonic() > deadline:
            break
    best = _faster(best, _recompute_cheapest(simulator, budget_bytes), budget_bytes)
    return None if best is None else improve(simulator, best, budget_bytes, deadline=deadline)


def _recompute_cheapest(simulator: Simulator, budget_bytes: int) -> Candidate | None:
    """Recompute the values that are cheapest per byte, as few as necessary; None if no number of them fits."""
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
        candidate = judge_decisions(simulator, keep, solver="greedy, cheapest per byte")
        if candidate is not None and candidate.peak_bytes <= budget_bytes:
            best, high = candidate, middle
        else:
            low = middle + 1
    return best


def _faster(best: Candidate | None, other: Candidate | None, budget_bytes: int) -> Candidate | None:
    if other is None or other.peak_bytes > budget_bytes:
        return best
    return other if best is None or other.extra_s < best.extra_s else best
