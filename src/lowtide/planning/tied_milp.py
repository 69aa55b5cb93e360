"""The MILP for deep models: repeated blocks share decisions, and rejected solutions are repaired.

Blocks with equal structure form a few groups with one decision each (`repetition.tie_blocks`), so that the programme
for 48 layers is as small as for seven. The byte rows are still those of the whole step. Models without repeated blocks
or with few ops are solved without ties.
"""

from __future__ import annotations

from dataclasses import dataclass

from .candidate import Candidate, judge_decisions
from .improve import improve
from .milp import Decisions, solve_milp
from .problem import Problem
from .repair import repair
from .repetition import RepeatedBlocks, find_repeated_blocks, tie_blocks
from .segments import block_cuts, keep_at_cuts
from .simulator import Simulator

_MAX_REPAIRS = 3
"""Rejected solutions of one attempt that are repaired. Doubled: up to twice the repair time."""
_MAX_OPS_WITHOUT_TIES = 400
"""Doubled: slightly faster plans for models of 400 to 800 ops, with a programme of several times the size."""


def solve_tied_milp(
    simulator: Simulator,
    budget_bytes: int,
    *,
    deadline: float,
    relative_gap: float = 0.005,
    good_enough_s: float = 0.0,
    max_nodes: int = 500,
) -> Candidate | None:
    """Return the best plan of two attempts, or None: blocks free, then with all block boundaries held.

    Each attempt may take `max_nodes` branch-and-bound nodes, and stops early if a repaired plan is good enough. The
    second attempt is skipped if the first is within `good_enough_s` extra time or provably optimal.
    """
    problem = simulator.problem
    repeats = find_repeated_blocks(problem)
    ties = tie_blocks(problem, repeats) if repeats and problem.n_ops > _MAX_OPS_WITHOUT_TIES else None
    solver = "MILP" if ties is None else "MILP, tied blocks"
    attempts: list[list[int]] = [[]]
    if boundaries := _boundary_ops(problem, repeats):
        attempts.append(boundaries)
    best: Candidate | None = None
    for always_held in attempts:
        repairs = _Repairs(simulator, budget_bytes, f"{solver}, repaired", deadline, good_enough_s)
        found = solve_milp(
            simulator,
            budget_bytes,
            ties=ties,
            deadline=deadline,
            relative_gap=relative_gap,
            max_unpacks_early=_max_unpacks_early(problem, repeats),
            max_extra_s=None if best is None else best.extra_s * (1 - relative_gap),
            always_held=always_held,
            max_nodes=max_nodes,
            on_rejected=repairs.try_repair,
            solver=solver,
        )
        plans = [plan for plan in (best, found.best, repairs.best) if plan is not None]
        best = min(plans, key=lambda plan: plan.extra_s, default=None)
        if (best is not None and best.extra_s <= good_enough_s) or (found.optimal and ties is None):
            break
    return best


@dataclass
class _Repairs:
    """Repairs of the decisions that the simulator rejected."""

    simulator: Simulator
    budget_bytes: int
    solver: str
    deadline: float
    good_enough_s: float
    best: Candidate | None = None
    tried: int = 0

    def try_repair(self, decisions: Decisions) -> bool:
        """Repair and improve these decisions. Return whether the best plan is good enough."""
        if self.tried == _MAX_REPAIRS:
            return False
        self.tried += 1
        keep, offload = decisions
        start = judge_decisions(
            self.simulator, keep, offload=offload, limit_bytes=self.budget_bytes, solver=self.solver
        )
        if start is None or (self.best is not None and start.extra_s >= self.best.extra_s):
            return False
        repaired = repair(self.simulator, start, self.budget_bytes, deadline=self.deadline)
        if repaired is None:
            return False
        repaired = improve(self.simulator, repaired, self.budget_bytes, deadline=self.deadline)
        if self.best is None or repaired.extra_s < self.best.extra_s:
            self.best = repaired
        return self.best.extra_s <= self.good_enough_s


def _boundary_ops(problem: Problem, repeats: list[RepeatedBlocks]) -> list[int]:
    """Return the unpinned ops with an output that crosses a boundary between repeated blocks."""
    if not repeats:
        return []
    crosses = keep_at_cuts(problem, block_cuts(problem, repeats))
    return [j for j in range(problem.n_ops) if crosses[j] and not problem.pinned[j]]


def _max_unpacks_early(problem: Problem, repeats: list[RepeatedBlocks]) -> int | None:
    """Return the number of unpacks in two blocks. None, no limit, without blocks or for few ops."""
    if not repeats or problem.n_ops < _MAX_OPS_WITHOUT_TIES:
        return None
    period = max(repeat.period for repeat in repeats)
    return 2 * period * problem.n_unpacks // problem.n_ops + 1
