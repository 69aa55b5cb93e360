"""Making a plan fit that nearly does, by small changes where it holds too much.

The programme plans for at most one replay an op and is careful about what lives inside a replay; just above the
smallest budgets, plans are better that replay a few ops more than once. At the worst place the largest
holders are looked at: drop one, do not retain it, or keep it (then what it is made from need not be there). The
change that removes most excess a second is taken, judged by the simulator. It may get stuck: then there is no
plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from .candidate import Candidate, judged
from .simulator import PeakAt, Simulator

_STEPS = 60
_HOLDERS_TRIED = 10


def repair(simulator: Simulator, start: Candidate, budget_bytes: int, *, deadline: float) -> Candidate | None:
    """A plan near `start` that fits, or None."""
    problem = simulator.problem
    best, excess = start, _excess(start, budget_bytes)
    # A change that costs no time is worth taking, but not without bound.
    least_s = 1e-4 * max(problem.trace.step_s, 1e-12)
    for _ in range(_STEPS):
        if excess == 0:
            break
        chosen: tuple[float, Candidate, int] | None = None
        for j in _largest_holders(simulator, best):
            for keep, released, offload in ways_of(best, j):
                if time.monotonic() > deadline:
                    return None
                if tuple(keep) == best.keep and released == best.released and offload == best.offload:
                    continue
                other = judged(
                    simulator, keep, released, offload=offload, limit_bytes=budget_bytes, solver=start.solver
                )
                if other is None:
                    continue
                removed = excess - _excess(other, budget_bytes)
                worth = removed / max(other.extra_s - best.extra_s, least_s)
                if removed > 0 and (chosen is None or worth > chosen[0]):
                    chosen = (worth, other, excess - removed)
        if chosen is None:
            break
        _, best, excess = chosen
    return best if excess == 0 else None


def ways_of(candidate: Candidate, op: int) -> Iterator[tuple[list[bool], frozenset[int], frozenset[int]]]:
    """What else can be done with what an op makes: drop it, not retain it, keep it, or put it into a store.

    Keeping it can help too: then its own inputs need not be there.
    """
    dropped, kept = list(candidate.keep), list(candidate.keep)
    dropped[op], kept[op] = False, True
    without = candidate.offload - {op}
    yield dropped, candidate.released - {op}, without
    yield dropped, candidate.released | {op}, without
    yield kept, candidate.released - {op}, without
    yield kept, candidate.released - {op}, candidate.offload | {op}


def _excess(candidate: Candidate, budget_bytes: int) -> int:
    """Bytes too many, summed over all places: it falls even where several places are equally full."""
    simulation = candidate.simulation
    over = [np.maximum(live - budget_bytes, 0).sum() for live in (simulation.forward_live, simulation.unpack_live)]
    return int(sum(over))


def _largest_holders(simulator: Simulator, candidate: Candidate) -> list[int]:
    """Ops whose values take most at the peak, without those that are pinned."""
    problem = simulator.problem
    at: PeakAt = candidate.simulation.peak_at
    found = candidate.simulation
    holders = simulator.holders(candidate.keep, candidate.released, at, found.written_before, found.prefetch_after)
    ops = dict.fromkeys(problem.producer[v] for v in holders)
    return [j for j in ops if not problem.pinned[j]][:_HOLDERS_TRIED]
