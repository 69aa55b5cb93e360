"""Repair a plan that exceeds the budget slightly, by small changes at its peak.

The MILP plans at most one replay per op and overestimates what is live during replays. Just above the smallest budgets,
better plans replay a few ops more than once. Each step looks at the largest values at the peak and tries all other
decisions for their ops. It takes the change that removes the most excess bytes per second. This can get stuck, and then
there is no result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from .candidate import Candidate, judge_decisions
from .simulator import Simulator

_MAX_STEPS = 60
_MAX_SIMULATED_OPS = 300_000
"""Ops and replays that one repair may simulate. Doubled: up to a second longer for each repair of a
long step, the same plans."""
_HOLDERS_TRIED = 10
"""Ops tried in each step. Doubled: twice the time."""
_CHANGES_TRIED = 4 * _HOLDERS_TRIED
"""Upper limit on simulations in one step."""
_MIN_COST = 1e-4
"""Lower limit on the cost of a change, as a share of a plain step: changes without cost do not always win."""


def repair(simulator: Simulator, start: Candidate, budget_bytes: int, *, deadline: float) -> Candidate | None:
    """Return a plan near `start` that fits, or None."""
    best, excess = start, _excess(start, budget_bytes)
    simulated_ops = 0
    for step in range(_MAX_STEPS):
        if excess == 0 or simulated_ops > _MAX_SIMULATED_OPS:
            break
        simulated_ops += _CHANGES_TRIED * (simulator.problem.n_ops + best.simulation.replayed_ops)
        change = _best_change(simulator, best, budget_bytes, deadline)
        if change is None:
            return None
        removed = excess - _excess(change, budget_bytes)
        best, excess = change, excess - removed
        if removed * (_MAX_STEPS - step) < excess:  # hopeless, even if all further steps remove as much
            return None
    return best if excess == 0 else None


def _best_change(simulator: Simulator, plan: Candidate, budget_bytes: int, deadline: float) -> Candidate | None:
    """Return the change of one op that removes the most excess bytes per second, or None if none removes any."""
    min_cost_s = _MIN_COST * max(simulator.problem.trace.step_s, 1e-12)
    excess = _excess(plan, budget_bytes)
    best: Candidate | None = None
    best_worth = 0.0
    for j in _largest_holders(simulator, plan):
        for keep, released, offload in _alternatives(plan, j):
            if time.monotonic() > deadline:
                return None
            if tuple(keep) == plan.keep and released == plan.released and offload == plan.offload:
                continue
            changed = judge_decisions(
                simulator, keep, released, offload=offload, limit_bytes=budget_bytes, solver=plan.solver
            )
            if changed is None:
                continue
            removed = excess - _excess(changed, budget_bytes)
            worth = removed / max(changed.extra_s - plan.extra_s, min_cost_s)
            if removed > 0 and worth > best_worth:
                best, best_worth = changed, worth
    return best


def _alternatives(candidate: Candidate, op: int) -> Iterator[tuple[list[bool], frozenset[int], frozenset[int]]]:
    """Yield all decisions for an op: recompute and retain it, recompute and release it, keep it, offload it.

    Keeping an op can lower the peak too: then backward does not need its inputs.
    """
    recomputed, kept = list(candidate.keep), list(candidate.keep)
    recomputed[op], kept[op] = False, True
    others_offloaded = candidate.offload - {op}
    yield recomputed, candidate.released - {op}, others_offloaded
    yield recomputed, candidate.released | {op}, others_offloaded
    yield kept, candidate.released - {op}, others_offloaded
    yield kept, candidate.released - {op}, candidate.offload | {op}


def _excess(candidate: Candidate, budget_bytes: int) -> int:
    """Return the excess bytes, summed over all places. The sum falls even where several places are equally full."""
    simulation = candidate.simulation
    excess = [np.maximum(live - budget_bytes, 0).sum() for live in (simulation.forward_live, simulation.unpack_live)]
    return int(sum(excess))


def _largest_holders(simulator: Simulator, candidate: Candidate) -> list[int]:
    """Return the ops, without pinned ones, whose outputs take the most bytes at the peak."""
    problem = simulator.problem
    simulation = candidate.simulation
    values = simulator.holders(
        candidate.keep, candidate.released, simulation.peak_at, simulation.written_before, simulation.prefetch_after
    )
    ops = dict.fromkeys(problem.producer[v] for v in values)
    return [j for j in ops if not problem.pinned[j]][:_HOLDERS_TRIED]
