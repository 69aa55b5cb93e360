"""Plans for deep stacks of equal blocks: the mixed integer programme with blocks tied into a few groups.

Blocks with equal structure get one decision a group (see `repetition.tie_blocks`), so that a model of 48
layers is no larger than one of seven; rows of bytes are still those of the whole step. Plans are a little
worse than untied ones at most by what one block more or less of a treatment is worth. Without repetition, and
for few ops, this is the plain programme. Where the programme finds nothing that fits, what it nearly found is
repaired.
"""

from __future__ import annotations

from .candidate import Candidate, judged
from .improve import improve
from .milp import MilpResult, solve_milp
from .problem import Problem
from .repair import repair
from .repetition import RepeatedBlocks, find_repeated_blocks, tie_blocks
from .segments import block_cuts, keep_at_cuts
from .simulator import Simulator

_MISSES_MENDED = 3
_SMALL = 400
"""Ops up to which every block has decisions of its own."""


def solve_chain(
    simulator: Simulator,
    budget_bytes: int,
    *,
    deadline: float,
    relative_gap: float = 0.005,
    good_enough_s: float = 0.0,
    max_nodes: int = 2_000,
    max_rounds: int = 40,
) -> Candidate | None:
    """Return the best plan of two attempts, or None: blocks free, then with block boundaries held (anchors).

    The second attempt is skipped if the first is within `good_enough_s` extra time or provably optimal.
    """
    problem = simulator.problem
    repeats = find_repeated_blocks(problem)
    ties = tie_blocks(problem, repeats) if repeats and problem.n_ops > _SMALL else None
    solver = "MILP, tied blocks" if ties is not None else "MILP"
    boundaries = keep_at_cuts(problem, block_cuts(problem, repeats))
    anchors = [j for j in range(problem.n_ops) if boundaries[j] and not problem.pinned[j]] if repeats else []
    best: Candidate | None = None
    for held in ([], anchors) if anchors else ([],):
        found = solve_milp(
            simulator,
            budget_bytes,
            ties=ties,
            deadline=deadline,
            relative_gap=relative_gap,
            reach_unpacks=reach_of(problem, repeats),
            better_than_s=None if best is None else best.extra_s * (1 - relative_gap),
            anchors=held,
            max_nodes=max_nodes,
            max_rounds=max_rounds,
        )
        other = fitting(simulator, found, budget_bytes, solver, deadline, good_enough_s)
        if other is not None and (best is None or other.extra_s < best.extra_s):
            best = other
        if (best is not None and best.extra_s <= good_enough_s) or (found.optimal and ties is None):
            break
    return best


def fitting(
    simulator: Simulator,
    found: MilpResult,
    budget_bytes: int,
    solver: str,
    deadline: float,
    good_enough_s: float = 0.0,
) -> Candidate | None:
    """Return the plan that the MILP found, or a repaired near miss of it if that is faster."""
    best: Candidate | None = None
    if found.keep is not None and found.simulation is not None:
        best = Candidate(tuple(found.keep), frozenset(), found.simulation, solver, found.offload)
    for keep, offload in found.misses[:_MISSES_MENDED]:
        if best is not None and best.extra_s <= good_enough_s:
            break
        near = judged(simulator, keep, offload=offload, limit_bytes=budget_bytes, solver=f"{solver}, repaired")
        if near is None or (best is not None and near.extra_s >= best.extra_s):
            continue
        repaired = repair(simulator, near, budget_bytes, deadline=deadline)
        if repaired is None:
            continue
        repaired = improve(simulator, repaired, budget_bytes, deadline=deadline)
        if best is None or repaired.extra_s < best.extra_s:
            best = repaired
    return best


def reach_of(problem: Problem, repeats: list[RepeatedBlocks]) -> int | None:
    """How many asks ahead of its own a replay can matter: two blocks; without blocks, no limit."""
    if not repeats or problem.n_ops < 400:
        return None
    period = max(repeat.period for repeat in repeats)
    return 2 * period * problem.n_unpacks // problem.n_ops + 1
