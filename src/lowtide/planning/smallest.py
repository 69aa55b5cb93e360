"""The smallest budget for which we know a plan, and that plan.

A search over simple schemes, each also with intermediates that are made again more than once (`again`), then
a descent that looks at who holds the most bytes at the peak, then the mixed integer programme at ever smaller
budgets. An upper bound on the true smallest budget, and always with a plan that the simulator accepts. Which
plans are tried does not depend on the budget that was asked for, and nothing but the time limit is left to chance:
so the budget that an error names is found again when it is asked for.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from .candidate import Candidate, judged
from .chain import solve_chain
from .formulation import Formulation
from .greedy import simple_schemes
from .problem import Problem
from .repetition import find_stretches
from .segments import block_cuts, even_cuts, keep_at_cuts
from .simulator import Simulator

_DESCENT_STEPS = 40
_HOLDERS_TRIED = 5
_BISECTIONS = 5
_CLOSE = 0.01
_PROBE_S, _PROBE_S_AN_OP = 1.0, 0.004
"""How long to look for a plan within one budget: where there is one it is found early, mostly."""


def smallest(simulator: Simulator, *, enough_bytes: int = 0, deadline: float) -> Candidate:
    """The plan of the least peak that was found; stops early at one that needs no more than `enough_bytes`."""
    fingerprint = simulator.problem.trace.fingerprint
    best = _searched(simulator, _found.get(fingerprint), enough_bytes, deadline)
    _found[fingerprint] = (best.keep, best.again)
    while len(_found) > _MOST_FOUND:
        _found.popitem(last=False)
    return best


_found: OrderedDict[str, tuple[tuple[bool, ...], frozenset[int]]] = OrderedDict()
"""The smallest plans found in this process, by the structure of the step: found again however busy the machine is."""
_MOST_FOUND = 16


def _searched(
    simulator: Simulator,
    known: tuple[tuple[bool, ...], frozenset[int]] | None,
    enough_bytes: int,
    deadline: float,
) -> Candidate:
    problem = simulator.problem
    best = judged(simulator, problem.keep_all(), solver="keep all")
    assert best is not None  # keeping everything replays nothing
    if known is not None:
        kept, again_ops = known
        keep = [kept or pinned for kept, pinned in zip(kept, problem.pinned, strict=True)]
        again = judged(simulator, keep, frozenset(j for j in again_ops if not keep[j]), solver="smallest peak")
        best = again if again is not None and _smaller(again, best) else best
        if best.peak_bytes <= enough_bytes:
            return best
    for keep, again_ops in _schemes(problem):
        tried = judged(simulator, keep, again_ops, solver="smallest peak")
        if tried is not None and _smaller(tried, best):
            best = tried
    if best.peak_bytes > enough_bytes:
        best = _descended(simulator, best, deadline)
    floor = floor_bytes(problem) - 1
    for _ in range(_BISECTIONS):
        if best.peak_bytes <= max(enough_bytes, floor * (1 + _CLOSE)) or time.monotonic() > deadline:
            break
        target = (floor + best.peak_bytes) // 2
        allowed_s = min((deadline - time.monotonic()) / 2, _PROBE_S + _PROBE_S_AN_OP * problem.n_ops)
        tried = solve_chain(simulator, target, deadline=time.monotonic() + allowed_s)
        if tried is not None and _smaller(tried, best):
            best = tried
        else:
            floor = target
    return best


def floor_bytes(problem: Problem) -> int:
    """Bytes below which no plan can be: at some op or ask they are alive whatever is decided."""
    model = Formulation(problem)
    forward, backward = model.certain_bytes(np.zeros(model.n_variables))
    return int(max([0.0, *forward, *backward]))


def _schemes(problem: Problem) -> Iterator[tuple[list[bool], frozenset[int]]]:
    """Segments, their intermediates retained, retained at block boundaries only, or not at all."""
    fine = block_cuts(problem, find_stretches(problem)) or even_cuts(problem, max(2, problem.n_ops // 4))
    boundary = keep_at_cuts(problem, fine)
    for _, keep in simple_schemes(problem):
        recomputed = [j for j in range(problem.n_ops) if not keep[j]]
        yield keep, frozenset()
        yield keep, frozenset(j for j in recomputed if not boundary[j])
        yield keep, frozenset(recomputed)


def _descended(simulator: Simulator, start: Candidate, deadline: float) -> Candidate:
    """Take from the peak what holds most there: recompute what is kept, retain less of what is recomputed."""
    problem, best = simulator.problem, start
    for _ in range(_DESCENT_STEPS):
        ops = dict.fromkeys(problem.maker[v] for v in simulator.holders(best.keep, best.again, best.simulation.peak_at))
        tried = 0
        better: Candidate | None = None
        for j in ops:
            if problem.pinned[j] or tried == _HOLDERS_TRIED or time.monotonic() > deadline:
                continue
            tried += 1
            dropped, kept = list(best.keep), list(best.keep)
            dropped[j], kept[j] = False, True
            # Keeping it can help too: then its own inputs need not be there.
            for keep, again in ((dropped, best.again - {j}), (dropped, best.again | {j}), (kept, best.again - {j})):
                other = judged(simulator, keep, again, solver="smallest peak")
                if other is not None and _smaller(other, better or best):
                    better = other
        if better is None:
            break
        best = better
    return best


def _smaller(one: Candidate, other: Candidate) -> bool:
    return (one.peak_bytes, one.extra_s) < (other.peak_bytes, other.extra_s)
