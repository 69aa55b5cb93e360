"""Plans for deep stacks of equal blocks: the mixed integer programme with blocks tied into a few groups.

Blocks with equal structure get one decision a group (see `repetition.tie_blocks`), so that a model of 48
layers is no larger than one of seven; rows of bytes are still those of the whole step. Plans are a little
worse than untied ones at most by what one block more or less of a treatment is worth. Without repetition, and
for few ops, this is the plain programme. Where the programme finds nothing that fits, what it nearly found is
repaired.
"""

from __future__ import annotations

import time

from .candidate import Candidate, judged
from .greedy import improve
from .milp import MilpResult, solve_milp
from .problem import Problem
from .repair import repair
from .repetition import Stretch, find_stretches, tie_blocks
from .segments import block_cuts, keep_at_cuts
from .simulator import Simulator

_MISSES_MENDED = 3
_SMALL = 400
"""Ops up to which every block has decisions of its own."""
_WORTH_A_LONG_SIGHT = 1.05
"""How far above what is good enough a plan must be for the last, slow attempt."""
_LEAST_SHARE = 0.5
"""Of the time that an attempt has taken: with less left, the next would end with nothing."""


def solve_chain(
    simulator: Simulator,
    budget_bytes: int,
    *,
    deadline: float,
    relative_gap: float = 0.005,
    good_enough_s: float = 0.0,
) -> Candidate | None:
    """The best plan found with tied blocks, if any fits; none better is looked for than `good_enough_s` extra."""
    problem = simulator.problem
    stretches = find_stretches(problem)
    reach = reach_of(problem, stretches)
    if not stretches:
        found = solve_milp(simulator, budget_bytes, deadline=deadline, relative_gap=relative_gap, reach_asks=reach)
        return fitting(simulator, found, budget_bytes, "MILP", deadline)
    ties = tie_blocks(problem, stretches) if problem.n_ops > _SMALL else None
    solver = "MILP, tied blocks" if ties is not None else "MILP"
    # First free, with a short sight. Where that misjudges long replays: with what crosses from block to block
    # held, so that there are none, which is how tight plans look. Then free again, with a long sight, which is slow.
    boundaries = keep_at_cuts(problem, block_cuts(problem, stretches))
    anchors = [j for j in range(problem.n_ops) if boundaries[j] and not problem.pinned[j]]
    best: Candidate | None = None
    took_s = 0.0
    for held, widen, share in (([], False, 0.9), (anchors, False, 0.5), ([], True, 1.0)):
        if best is not None and best.extra_s <= good_enough_s * (_WORTH_A_LONG_SIGHT if widen else 1):
            break
        began = time.monotonic()
        if deadline - began < _LEAST_SHARE * took_s:
            break
        until = began + share * (deadline - began)
        found = solve_milp(
            simulator,
            budget_bytes,
            ties=ties,
            deadline=until,
            relative_gap=relative_gap,
            reach_asks=reach,
            better_than_s=None if best is None else best.extra_s * (1 - relative_gap),
            anchors=held,
            widen=widen,
        )
        took_s = time.monotonic() - began
        other = fitting(simulator, found, budget_bytes, solver, deadline, good_enough_s)
        if other is not None and (best is None or other.extra_s < best.extra_s):
            best = other
        if found.optimal and ties is None and not held:
            break  # no other attempt could be better by more than the gap
    return best


def has_ties(problem: Problem) -> bool:
    """Whether blocks share decisions, so that a programme without ties could find better ones."""
    return problem.n_ops > _SMALL and bool(find_stretches(problem))


def fitting(
    simulator: Simulator,
    found: MilpResult,
    budget_bytes: int,
    solver: str,
    deadline: float,
    good_enough_s: float = 0.0,
) -> Candidate | None:
    """What the programme found; unless that is good enough also what it nearly found, repaired, if it is better.

    The last rounds of the programme often have no time left for a good plan, where the first nearly had one.
    """
    best: Candidate | None = None
    if found.keep is not None and found.simulation is not None:
        best = Candidate(tuple(found.keep), frozenset(), found.simulation, solver, found.offload)
    for keep, offload in found.misses[:_MISSES_MENDED]:
        left_s = deadline - time.monotonic()
        if (best is not None and best.extra_s <= good_enough_s) or left_s < 0:
            break
        near = judged(simulator, keep, offload=offload, room_bytes=budget_bytes, solver=f"{solver}, repaired")
        if near is None or (best is not None and near.extra_s >= best.extra_s):
            continue
        mended = repair(simulator, near, budget_bytes, deadline=time.monotonic() + max(left_s / 2, 0.5))
        if mended is None:
            continue
        mended = improve(simulator, mended, budget_bytes, deadline=time.monotonic() + max(left_s / 4, 0.2))
        if best is None or mended.extra_s < best.extra_s:
            best = mended
    return best


def reach_of(problem: Problem, stretches: list[Stretch]) -> int | None:
    """How many asks ahead of its own a replay can matter: two blocks; without blocks, no limit."""
    if not stretches or problem.n_ops < 400:
        return None
    period = max(stretch.period for stretch in stretches)
    return 2 * period * problem.n_asks // problem.n_ops + 1
