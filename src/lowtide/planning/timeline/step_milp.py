"""Plans from the mixed integer programme for timelines, with byte rows added where they turn out to be needed.

Each round solves the programme, simulates the solution, and adds byte rows at the events where the simulator finds too
many bytes. The first rounds are relaxed: fractional decisions are allowed. If an event with a row still exceeds the
budget by x bytes while ops J were replayed for it, a *conditional* row says so for plans that replay all of J there:
`bytes(t) + x · (1 - Σ_J (1 - replayed)) ≤ budget`. After a few of these the row is made safe, and then its budget is
lowered, which also excludes plans that fit.

A returned plan always fits. `minimize_peak` looks for the smallest budget instead of the least time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import OptimizeResult

from ..highs import minimize
from ..rows import Rows, Terms, sum_terms
from .decisions import Decisions, keep_all
from .stage_table import StageTable
from .step_byte_rows import ByteRow, StepByteRows
from .step_candidate import StepCandidate, judge_step
from .step_formulation import StepFormulation
from .step_simulator import StepSimulation

_EVENTS_PER_ROUND = 4
"""Events that get a row in one round. Doubled: fewer rounds, more rows that are not needed."""
_RELAXED_ROUNDS = 8
"""Upper limit on relaxed rounds. Doubled: fewer integer rounds where many rows are needed."""
_CONDITIONAL_ROWS = 4
"""Upper limit on conditional rows of one event. Doubled: more rounds, rarely a better plan."""
_ROOT_NODES = 10
"""Nodes that one integer solve counts in addition: the root relaxation takes about as long. Doubled: fewer rounds."""
_MIN_DISTANCE = 64
"""Events with rows from one round are at least 1/64 of the step apart. Doubled: more rows for one peak."""
_HOLDING_COST = 1e-7
"""Cost of holding a value, so that values which nothing needs are not held."""
_TIME_SHARE = 1e-6
"""Weight of time where the peak is minimized."""
_PEAK_TOLERANCE = 1.0005
"""Share of the peak in the solution up to which a simulated peak counts as equal."""


@dataclass(frozen=True, eq=False)
class StepMilpResult:
    """The best plan found, and decisions that the rows allowed but that do not fit."""

    best: StepCandidate | None
    rejected: tuple[StepCandidate, ...]


@dataclass
class _EventRow:
    """The byte row of one event, and how it has been tightened."""

    row: ByteRow
    conditional: int = 0
    is_safe: bool = False
    margin_bytes: float = 0.0
    rows: list[tuple[Terms, float]] = field(default_factory=list)
    """Terms and limit of each row, in units of bytes."""


def solve_step_milp(
    table: StageTable,
    budget_bytes: int,
    *,
    deadline: float,
    ties: Sequence[int] | None = None,
    relative_gap: float = 0.002,
    max_nodes: int = 100,
    minimize_peak: bool = False,
    solver: str = "MILP",
) -> StepMilpResult:
    """Search for at most `max_nodes` branch-and-bound nodes in total. `deadline` (`time.monotonic()`) is a safety net.

    With `minimize_peak`, return the plan with the smallest peak found, whether it fits or not.
    """
    model = StepFormulation(table, ties)
    if not model.n_variables:
        plain = judge_step(table, keep_all(table.facts), solver)
        return StepMilpResult(plain if minimize_peak or plain.fits(budget_bytes) else None, ())
    loop = _StepRowLoop(model, budget_bytes, deadline, relative_gap, minimize_peak, solver)
    return loop.run(max_nodes)


class _StepRowLoop:
    """The loop of solving, simulating and adding byte rows."""

    def __init__(
        self,
        model: StepFormulation,
        budget_bytes: int,
        deadline: float,
        relative_gap: float,
        minimize_peak: bool,
        solver: str,
    ) -> None:
        self.model = model
        self.budget_bytes = budget_bytes
        self.deadline = deadline
        self.relative_gap = relative_gap
        self.solver = solver
        self.byte_rows = StepByteRows(model)
        self.rows = Rows(model.n_variables)
        self.peak = self.rows.new_variable() if minimize_peak else None
        """With `minimize_peak`: the variable for the peak."""
        model.add_structure(self.rows)
        self._events: dict[int, _EventRow] = {}
        self._rejected: list[StepCandidate] = []
        self._smallest: StepCandidate | None = None
        self._judged: dict[Decisions, StepCandidate] = {}

    def run(self, max_nodes: int) -> StepMilpResult:
        """Return the first plan that fits, or with `minimize_peak` the one with the smallest peak."""
        self._find_events()
        nodes_left = max_nodes
        while nodes_left > 0 and time.monotonic() < self.deadline:
            found = self._solve(max_nodes=nodes_left)
            if found.x is None:
                break
            nodes_left -= _ROOT_NODES + int(found.mip_node_count or 0)
            plan = self._judge(found)
            if plan.fits(self._limit_bytes(found)):
                return StepMilpResult(plan if self.peak is None else self._smallest, tuple(self._rejected))
            self._rejected.append(plan)
            if not self._tighten(plan.simulation, found):
                break
        return StepMilpResult(None if self.peak is None else self._smallest, tuple(self._rejected))

    def _find_events(self) -> None:
        """Add rows at the events where relaxed solutions have too many bytes."""
        for _ in range(_RELAXED_ROUNDS):
            found = self._solve(max_nodes=None)
            if found.x is None or time.monotonic() > self.deadline:
                return
            simulation = self._judge(found).simulation
            overfull = _overfull(simulation, self._limit_bytes(found))
            if not [self._add_event(t) for t, _ in overfull if t not in self._events]:
                return

    def _judge(self, found: OptimizeResult) -> StepCandidate:
        decisions = self.model.decisions(found.x)
        if decisions not in self._judged:
            self._judged[decisions] = judge_step(self.model.table, decisions, self.solver)
        plan = self._judged[decisions]
        if not plan.simulation.late_replays and (
            self._smallest is None
            or (plan.peak_bytes, plan.extra_s) < (self._smallest.peak_bytes, self._smallest.extra_s)
        ):
            self._smallest = plan
        return plan

    def _limit_bytes(self, found: OptimizeResult) -> int:
        if self.peak is None:
            return self.budget_bytes
        return int(found.x[self.peak] * self.model.byte_unit * _PEAK_TOLERANCE)

    def _solve(self, *, max_nodes: int | None) -> OptimizeResult:
        """Solve the programme. With `max_nodes` None fractional decisions are allowed."""
        model, n = self.model, self.rows.n_variables
        cost = np.zeros(n)
        cost[: model.n_variables] = model.cost()
        cost[model.binary] += _HOLDING_COST
        upper = np.ones(n)
        upper[: model.n_variables] = model.upper_limits()
        if self.peak is not None:
            cost *= _TIME_SHARE
            cost[self.peak] = 1.0
            upper[self.peak] = np.inf
        integrality = np.zeros(n)
        integrality[model.binary] = max_nodes is not None
        options = {} if max_nodes is None else {"node_limit": max_nodes, "mip_rel_gap": self.relative_gap}
        return minimize(cost, self.rows, upper, deadline=self.deadline, integrality=integrality, **options)

    def _add_event(self, event: int) -> bool:
        row = _EventRow(self.byte_rows.at(event, self.rows))
        self._events[event] = row
        self._add_row(row, row.row.terms, row.row.fixed_bytes)
        return True

    def _add_row(self, row: _EventRow, terms: Terms, fixed_bytes: float) -> None:
        """Add the row `terms + fixed_bytes ≤ budget`, all in bytes."""
        unit = self.model.byte_unit
        scaled = {variable: nbytes / unit for variable, nbytes in terms.items()}
        limit = -fixed_bytes / unit
        if self.peak is None:
            limit += self.budget_bytes / unit
        else:
            scaled[self.peak] = -1.0
        row.rows.append((scaled, limit))
        self.rows.add(scaled, -np.inf, limit)

    def _tighten(self, simulation: StepSimulation, found: OptimizeResult) -> bool:
        """Add or tighten rows at the fullest events. Return whether anything has changed."""
        overfull = _overfull(simulation, self._limit_bytes(found))
        for event, excess_bytes in overfull:
            if event not in self._events:
                self._add_event(event)
            else:
                self._tighten_event(event, excess_bytes, simulation, found)
        return bool(overfull)

    def _tighten_event(
        self, event: int, excess_bytes: float, simulation: StepSimulation, found: OptimizeResult
    ) -> None:
        model, row = self.model, self._events[event]
        stage = model.table.stage_at[event]
        replayed = [model.replayed[j].get(stage, -1) for t, j in simulation.replayed_at if t == event]
        replayed = sorted({variable for variable in replayed if variable >= 0})
        fixed_bytes = row.row.fixed_bytes
        if replayed and row.conditional < _CONDITIONAL_ROWS:
            row.conditional += 1
            more_bytes = excess_bytes + self._slack_bytes(row, found)
            terms = sum_terms([*row.row.terms.items(), *((variable, more_bytes) for variable in replayed)])
            self._add_row(row, terms, fixed_bytes - more_bytes * (len(replayed) - 1))
        elif not row.is_safe and row.row.replay_terms:
            row.is_safe = True
            terms = sum_terms([*row.row.terms.items(), *row.row.replay_terms.items()])
            self._add_row(row, terms, fixed_bytes - model.facts.rise_bytes[event])
        else:
            row.margin_bytes += excess_bytes
            self._add_row(row, row.row.terms, fixed_bytes + row.margin_bytes)

    def _slack_bytes(self, row: _EventRow, found: OptimizeResult) -> float:
        """Return how many bytes the solution leaves free in the first row of an event."""
        terms, limit = row.rows[0]
        used = sum(coefficient * float(found.x[variable]) for variable, coefficient in terms.items())
        return max(0.0, (limit - used) * self.model.byte_unit)


def _overfull(simulation: StepSimulation, limit_bytes: int) -> list[tuple[int, float]]:
    """Return the events with most bytes above the limit, and these bytes, at some distance from each other."""
    excess = simulation.live.astype(np.float64) - limit_bytes
    distance = max(1, len(excess) // _MIN_DISTANCE)
    found: list[tuple[int, float]] = []
    while len(found) < _EVENTS_PER_ROUND and len(excess) and excess.max() > 0:
        t = int(excess.argmax())
        found.append((t, float(excess[t])))
        excess[max(0, t - distance) : t + distance + 1] = 0
    return found
