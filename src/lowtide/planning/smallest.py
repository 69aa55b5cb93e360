"""The smallest budget for which a plan is known, and that plan.

The simple schemes are tried, each also with released intermediates and with offloaded values. This is an upper bound
on the true smallest budget, always with a plan that the simulator accepts. The schemes do not depend on the budget that
was asked for, so a budget that an error names works when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .bits import bits_of, where
from .candidate import Candidate, judged
from .fast_judge import FastJudge
from .formulation import Formulation
from .improve import simple_schemes
from .problem import Problem
from .repetition import find_repeated_blocks
from .segments import block_cuts, even_cuts, keep_at_cuts
from .simulator import Simulator

_Decisions = tuple[list[bool], frozenset[int], frozenset[int]]  # keep, again, offload


def smallest(simulator: Simulator, *, enough_bytes: int = 0) -> Candidate:
    """Return the plan with the smallest peak among the simple schemes.

    Offloaded values are written in time for `enough_bytes`, if that is possible.
    """
    problem = simulator.problem
    best = judged(simulator, problem.keep_all(), solver="keep all")
    assert best is not None  # keeping everything replays nothing
    quick = FastJudge(problem)
    for decisions in _schemes(problem):
        best = _judged_if_smaller(simulator, quick, decisions, best, enough_bytes) or best
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
    fine = block_cuts(problem, find_repeated_blocks(problem)) or even_cuts(problem, max(2, problem.n_ops // 4))
    boundary = keep_at_cuts(problem, fine)
    for _, keep in simple_schemes(problem):
        recomputed = [j for j in range(problem.n_ops) if not keep[j]]
        for released in (nothing, frozenset(j for j in recomputed if not boundary[j]), frozenset(recomputed)):
            yield keep, released, nothing
            if movable:
                yield keep, released, movable


def _judged_if_smaller(
    simulator: Simulator, quick: FastJudge, decisions: _Decisions, than: Candidate, limit_bytes: int = 0
) -> Candidate | None:
    """The plan, if its peak is smaller; most are not, which takes little time to see."""
    keep, released, offload = decisions
    if not offload:
        kept = simulator.problem.effective_bits(where(keep))
        trial = quick.judge(kept, bits_of(released) & ~kept, than.peak_bytes)
        if trial is None or trial.excess_bytes:
            return None
    other = judged(simulator, keep, released, offload=offload, limit_bytes=limit_bytes, solver="smallest peak")
    return other if other is not None and _smaller(other, than) else None


def _smaller(one: Candidate, other: Candidate) -> bool:
    return (one.peak_bytes, one.extra_s) < (other.peak_bytes, other.extra_s)
