"""The smallest budget for which a plan is known, and that plan.

The simple schemes are tried, each also with released intermediates and with offloaded values. The result is an upper
limit on the true smallest budget. The schemes do not depend on the requested budget, so that a budget which an error
names is feasible when it is requested.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .bits import bits_of, bits_where
from .candidate import Candidate, judge_decisions
from .fast_judge import FastJudge
from .formulation import Formulation
from .improve import simple_schemes
from .minimum_bytes import MinimumBytes
from .problem import Problem
from .repetition import find_repeated_blocks
from .segments import block_cuts, even_cuts, keep_at_cuts
from .simulator import Simulator

_Decisions = tuple[list[bool], frozenset[int], frozenset[int]]
"""By op: whether it is kept. The recomputed ops that are released. The kept ops that are offloaded or compressed."""

_ANY_S = 1e30
"""A limit on extra time that all plans meet."""


def smallest(simulator: Simulator, *, limit_bytes: int = 0) -> Candidate:
    """Return the plan with the smallest peak among the simple schemes.

    Forward waits for values to be offloaded where live bytes would exceed `limit_bytes`.
    """
    problem = simulator.problem
    best = judge_decisions(simulator, problem.keep_all(), solver="keep all")
    assert best is not None  # keeping everything replays nothing
    fast_judge = FastJudge(problem)
    for decisions in _schemes(problem):
        best = _judged_if_smaller(simulator, fast_judge, decisions, best, limit_bytes) or best
    return best


def floor_bytes(problem: Problem) -> int:
    """Return bytes that are alive at some op or unpack under any decisions: no plan has a smaller peak."""
    model = Formulation(problem)
    forward, backward = MinimumBytes(model).totals(np.zeros(model.n_variables))
    return int(max([0.0, *forward, *backward]))


def _schemes(problem: Problem) -> Iterator[_Decisions]:
    """Yield every simple scheme with its recomputed values retained, retained at block boundaries only, or released.

    Each with all kept values in memory, then with all of them offloaded or compressed.
    """
    nothing: frozenset[int] = frozenset()
    storable = frozenset(j for j in range(problem.n_ops) if problem.offloadable[j])
    cuts = block_cuts(problem, find_repeated_blocks(problem)) or even_cuts(problem, max(2, problem.n_ops // 4))
    crosses = keep_at_cuts(problem, cuts)
    for _, keep in simple_schemes(problem):
        recomputed = [j for j in range(problem.n_ops) if not keep[j]]
        for released in (nothing, frozenset(j for j in recomputed if not crosses[j]), frozenset(recomputed)):
            yield keep, released, nothing
            if storable:
                yield keep, released, storable


def _judged_if_smaller(
    simulator: Simulator, fast_judge: FastJudge, decisions: _Decisions, best: Candidate, limit_bytes: int
) -> Candidate | None:
    """Return the candidate if its peak is smaller than that of `best`. The fast judge rejects most of the others."""
    keep, released, offload = decisions
    if not offload:
        kept = simulator.problem.effective_bits(bits_where(keep))
        result = fast_judge.judge(
            kept,
            bits_of(released) & ~kept,
            best.peak_bytes,
            penalty_s_per_byte=2 * _ANY_S,  # a single excess byte exceeds the limit
            limit_s=_ANY_S,
        )
        if result is None:
            return None
    other = judge_decisions(simulator, keep, released, offload=offload, limit_bytes=limit_bytes, solver="smallest peak")
    if other is None or (other.peak_bytes, other.extra_s) >= (best.peak_bytes, best.extra_s):
        return None
    return other
