"""The smallest budget for which we know a plan, and that plan.

A search over simple schemes, each also with intermediates that are made again more than once (`again`), then
a descent that looks at who holds the most bytes at the peak, then rotor's schedules and the mixed integer programme
at ever smaller budgets. An upper bound on the true smallest budget, and always with a plan that the simulator
accepts. Which plans are tried does not depend on the budget that was asked for, and nothing but the time limit is
left to chance: so the budget that an error names is found again when it is asked for.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from .bits import bits_of, where
from .candidate import Candidate, judged
from .chain import solve_chain
from .formulation import Formulation
from .greedy import simple_schemes
from .problem import Problem
from .repair import ways_of
from .repetition import find_stretches
from .rotor import solve_rotor
from .segments import block_cuts, even_cuts, keep_at_cuts
from .simulator import Simulator
from .trials import Trials

_DESCENT_STEPS = 40
_HOLDERS_TRIED = 5
_BISECTIONS = 5
_CLOSE = 0.01
_PROBE_S, _PROBE_S_AN_OP = 1.0, 0.004
"""How long to look for a plan within one budget: where there is one it is found early, mostly."""


def smallest(simulator: Simulator, *, enough_bytes: int = 0, deadline: float) -> Candidate:
    """The plan of the least peak that was found; stops early at one that needs no more than `enough_bytes`."""
    problem = simulator.problem
    key = problem.trace.fingerprint, problem.link is not None, problem.packings != ()
    known = _found.setdefault(key, [])
    best: Candidate | None = None
    for kept, again, offload in known:
        keep = [kept or pinned for kept, pinned in zip(kept, problem.pinned, strict=True)]
        one = judged(simulator, keep, again, offload=offload, room_bytes=enough_bytes, solver="smallest peak")
        best = one if one is not None and (best is None or _smaller(one, best)) else best
    if best is None or best.peak_bytes > enough_bytes:
        # Not from what is known on: that would find other plans the second time.
        searched = _searched(simulator, enough_bytes, deadline)
        if searched.peak_bytes > enough_bytes and any(problem.offloadable):
            # More choices may lead a search astray: they must not make the smallest budget larger.
            simple = smallest(Simulator(Problem(problem.trace)), enough_bytes=enough_bytes, deadline=deadline)
            other = judged(simulator, simple.keep, simple.again, room_bytes=enough_bytes, solver=simple.solver)
            searched = other if other is not None and _smaller(other, searched) else searched
        if best is None or _smaller(searched, best):
            best = searched
            known.append((list(best.keep), best.again, best.offload))
            del known[:-_MOST_ALIKE]
    _found.move_to_end(key)
    while len(_found) > _MOST_FOUND:
        _found.popitem(last=False)
    return best


_Decisions = tuple[list[bool], frozenset[int], frozenset[int]]  # keep, again, offload
_found: OrderedDict[tuple[str, bool, bool], list[_Decisions]] = OrderedDict()
"""The smallest plans found in this process, by the structure of the step: found again however busy the machine is.

Several for one structure, since what lies beside the values differs from profile to profile.
"""
_MOST_FOUND, _MOST_ALIKE = 16, 4


def _searched(simulator: Simulator, enough_bytes: int, deadline: float) -> Candidate:
    problem = simulator.problem
    best = judged(simulator, problem.keep_all(), solver="keep all")
    assert best is not None  # keeping everything replays nothing
    starts = {False: best, True: best}  # with and without values that wait elsewhere
    quick = Trials(problem)
    for decisions in _schemes(problem):
        away = bool(decisions[2])
        starts[away] = _judged_if_smaller(simulator, quick, decisions, starts[away], enough_bytes) or starts[away]
    for start in dict.fromkeys(starts.values()):
        down = _descended(simulator, quick, start, deadline) if start.peak_bytes > enough_bytes else start
        best = down if _smaller(down, best) else best
    floor = floor_bytes(problem) - 1
    for _ in range(_BISECTIONS):
        if best.peak_bytes <= max(enough_bytes, floor * (1 + _CLOSE)) or time.monotonic() > deadline:
            break
        target = (floor + best.peak_bytes) // 2
        allowed_s = min((deadline - time.monotonic()) / 2, _PROBE_S + _PROBE_S_AN_OP * problem.n_ops)
        tried = solve_rotor(simulator, target) or solve_chain(simulator, target, deadline=time.monotonic() + allowed_s)
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


def _schemes(problem: Problem) -> Iterator[_Decisions]:
    """Segments, their intermediates retained, retained at block boundaries only, or not at all; what is kept, away."""
    nothing: frozenset[int] = frozenset()
    movable = frozenset(j for j in range(problem.n_ops) if problem.offloadable[j])
    fine = block_cuts(problem, find_stretches(problem)) or even_cuts(problem, max(2, problem.n_ops // 4))
    boundary = keep_at_cuts(problem, fine)
    for _, keep in simple_schemes(problem):
        recomputed = [j for j in range(problem.n_ops) if not keep[j]]
        for again in (nothing, frozenset(j for j in recomputed if not boundary[j]), frozenset(recomputed)):
            yield keep, again, nothing
            if movable:
                yield keep, again, movable


def _judged_if_smaller(
    simulator: Simulator, quick: Trials, decisions: _Decisions, than: Candidate, room_bytes: int = 0
) -> Candidate | None:
    """The plan, if its peak is smaller; most are not, which takes little time to see."""
    keep, again, offload = decisions
    if not offload:
        kept = simulator.problem.obeyed_bits(where(keep))
        trial = quick.judge(kept, bits_of(again) & ~kept, than.peak_bytes)
        if trial is None or trial.excess_bytes:
            return None
    other = judged(simulator, keep, again, offload=offload, room_bytes=room_bytes, solver="smallest peak")
    return other if other is not None and _smaller(other, than) else None


def _descended(simulator: Simulator, quick: Trials, start: Candidate, deadline: float) -> Candidate:
    """Take from the peak what holds most there: recompute what is kept, retain less of what is recomputed."""
    problem, best = simulator.problem, start
    for _ in range(_DESCENT_STEPS):
        found = best.simulation
        holders = simulator.holders(best.keep, best.again, found.peak_at, found.written_by, found.read_after)
        ops = dict.fromkeys(problem.maker[v] for v in holders)
        tried = 0
        better: Candidate | None = None
        for j in ops:
            if problem.pinned[j] or tried == _HOLDERS_TRIED or time.monotonic() > deadline:
                continue
            tried += 1
            for decisions in ways_of(best, j):
                better = _judged_if_smaller(simulator, quick, decisions, better or best) or better
        if better is None:
            break
        best = better
    return best


def _smaller(one: Candidate, other: Candidate) -> bool:
    return (one.peak_bytes, one.extra_s) < (other.peak_bytes, other.extra_s)
