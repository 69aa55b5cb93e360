"""Plans from the mixed integer programme (`formulation`), with byte rows added where they turn out to be needed.

Each round solves the programme, simulates the solution, and adds byte rows at the events where the simulator finds too
many bytes. The first rounds are relaxed: fractional decisions are allowed, which takes milliseconds and shows most of
the events that need rows. If the simulator still finds too many bytes at an event that has a row, the row is made
safe, then its budget is lowered.

A returned plan always fits. It is optimal within `relative_gap` among plans that replay every op at most once, if the
rows model the live bytes correctly. Plans that replay an op twice are not found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import OptimizeResult

from .byte_rows import ByteRows
from .candidate import Candidate
from .formulation import Formulation
from .highs import OPTIMAL, minimize
from .rows import Event, Floats, Rows
from .simulator import Bytes, Simulation, Simulator

_EVENTS_PER_ROUND = 4
"""Events that get a row in one round. Doubled: fewer rounds, more rows that are not needed."""
_RELAXED_ROUNDS = 8
"""Upper limit on relaxed rounds. Doubled: fewer integer rounds where many rows are needed."""
_ROOT_NODES = 10
"""Nodes that one integer solve counts in addition: the root relaxation takes about as long. Doubled: fewer rounds."""
_MAX_EXACT_VARIABLES = 2_000
"""Variables of a programme that is solved as a whole. In larger ones, ops that the relaxation holds stay held. Doubled:
more programmes take 1 to 5 s instead of 0.1 to 1 s, some for slightly faster plans."""
_MAX_RESTRICTED_GAP = 0.05
"""Share of the relaxed cost that a solution with all integral decisions of the relaxation may cost more. Doubled:
fewer second solves, slightly slower plans."""
_INTEGRAL = 1e-6
"""Tolerance of integral decisions."""
_HOLDING_COST = 1e-7
"""Cost of holding a value, so that values which nothing needs are not held."""

Decisions = tuple[list[bool], frozenset[int]]
"""By op: whether it is kept. And the kept ops whose outputs are offloaded or compressed."""


@dataclass(frozen=True, eq=False)
class MilpResult:
    """The best plan found."""

    best: Candidate | None
    optimal: bool
    """The plan is within the relative gap of the best one, and no row overestimates live bytes."""


OnRejected = Callable[[Decisions], bool]
"""Called with decisions that the rows allowed and the simulator rejected. Returns whether to stop the search."""


def solve_milp(
    simulator: Simulator,
    budget_bytes: int,
    *,
    ties: Sequence[int] | None = None,
    deadline: float,
    relative_gap: float = 0.002,
    max_unpacks_early: int | None = None,
    max_extra_s: float | None = None,
    always_held: Sequence[int] = (),
    max_nodes: int = 500,
    on_rejected: OnRejected | None = None,
    solver: str = "MILP",
) -> MilpResult:
    """Search for at most `max_nodes` branch-and-bound nodes in total. `deadline` (`time.monotonic()`) is a safety net.

    `ties` and `max_unpacks_early` are those of `Formulation` and `ByteRows`. A plan must not take more than
    `max_extra_s` extra time. The ops in `always_held` are held or stored. `solver` is the name in the candidate.
    """
    model = Formulation(simulator.problem, ties)
    if not model.n_variables:
        return _without_decisions(simulator, budget_bytes, solver)
    byte_rows = ByteRows(model, simulator.problem.n_unpacks if max_unpacks_early is None else max_unpacks_early)
    loop = _RowLoop(simulator, model, byte_rows, budget_bytes, deadline, relative_gap, max_extra_s, always_held)
    return loop.run(max_nodes, on_rejected, solver)


def _without_decisions(simulator: Simulator, budget_bytes: int, solver: str) -> MilpResult:
    """Return the result for a step in which no saved value is made."""
    keep = simulator.problem.keep_all()
    simulation = simulator.run(keep)
    fits = simulation.peak_bytes <= budget_bytes
    best = Candidate(tuple(keep), frozenset(), simulation, solver) if fits else None
    return MilpResult(best, optimal=fits)


@dataclass
class _EventRow:
    """How the byte row of one event is made."""

    safe: bool = False
    margin_bytes: float = 0.0

    def tighten(self, event: Event, excess_bytes: float) -> None:
        """Make the row safe, or lower its budget by `excess_bytes`. Rows of forward have no safe form."""
        if event.phase == "unpack" and not self.safe:
            self.safe = True
        else:
            self.margin_bytes += excess_bytes


@dataclass
class _RowLoop:
    """The loop of solving, simulating and adding byte rows."""

    simulator: Simulator
    model: Formulation
    byte_rows: ByteRows
    budget_bytes: int
    deadline: float
    relative_gap: float
    max_extra_s: float | None
    always_held: Sequence[int]

    def __post_init__(self) -> None:
        self._cost = self.model.cost()
        self._exact = True
        """No programme so far was too large to be solved as a whole."""
        self._events: dict[Event, _EventRow] = {}
        """The events that have a byte row."""
        if self.model.problem.n_unpacks:
            self._events[Event("unpack", 0)] = _EventRow()

    def run(self, max_nodes: int, on_rejected: OnRejected | None, solver: str) -> MilpResult:
        """Return the first plan that fits."""
        self._find_events()
        nodes_left = max_nodes
        while nodes_left > 0 and time.monotonic() < self.deadline:
            found = self._solve(max_nodes=nodes_left)
            if found.x is None:
                break
            nodes_left -= _ROOT_NODES + int(found.mip_node_count or 0)
            decisions = keep, offload = _decisions(self.model, found.x)
            simulation = self._simulate(decisions)
            if simulation.peak_bytes <= self.budget_bytes:
                best = Candidate(tuple(keep), frozenset(), simulation, solver, offload)
                optimal = self._exact and found.status == OPTIMAL and not any(map(self._overestimates, self._events))
                return MilpResult(best, optimal)
            if on_rejected is not None and on_rejected(decisions):
                break
            self._tighten_or_add_events(simulation)
        return MilpResult(None, optimal=False)

    def _find_events(self) -> None:
        """Add rows at the events where relaxed solutions have too many bytes."""
        for _ in range(_RELAXED_ROUNDS):
            found = self._solve(max_nodes=None)
            if found.x is None or not self._add_events(self._simulate(_decisions(self.model, found.x))):
                return

    def _simulate(self, decisions: Decisions) -> Simulation:
        keep, offload = decisions
        return self.simulator.run(keep, offload=offload, limit_bytes=self.budget_bytes)

    def _solve(self, *, max_nodes: int | None) -> OptimizeResult:
        """Solve the programme. With `max_nodes` None fractional decisions are allowed."""
        model = self.model
        rows = Rows(model.n_variables)
        model.add_structure(rows)
        for event, row in self._events.items():
            self.byte_rows.add(rows, event, self.budget_bytes - row.margin_bytes, safe=row.safe)
        waits = model.add_wait_rows(rows)
        cost = np.zeros(rows.n_variables)
        cost[: model.n_variables] = self._cost
        for variable, seconds in waits:
            cost[variable] = seconds / model.time_unit
        if self.max_extra_s is not None:
            terms = {int(variable): float(cost[variable]) for variable in np.flatnonzero(cost)}
            variable_s = self.max_extra_s - model.problem.trace.copying_s
            rows.add(terms, -np.inf, variable_s / model.time_unit)
        cost[: model.n_groups] += _HOLDING_COST
        for j in self.always_held:
            if model.relevant[j]:
                rows.add(model.held_or_stored(j), 1.0, np.inf)
        upper = np.ones(rows.n_variables)
        upper[: model.n_variables] = model.upper_limits()
        lower = np.zeros(rows.n_variables)
        if max_nodes is None:
            return minimize(cost, rows, upper, deadline=self.deadline)
        if rows.n_variables <= _MAX_EXACT_VARIABLES:
            return self._solve_integers(cost, rows, lower, upper, max_nodes)
        self._exact = False
        relaxed = minimize(cost, rows, upper, deadline=self.deadline)
        if relaxed.x is None:
            return relaxed
        shares = relaxed.x[model.binary]
        least, most = lower.copy(), upper.copy()
        least[model.binary], most[model.binary] = shares > 1 - _INTEGRAL, shares > _INTEGRAL
        max_nodes = min(max_nodes, _ROOT_NODES)
        found = self._solve_integers(cost, rows, least, most, max_nodes)
        if found.x is not None and found.fun <= relaxed.fun * (1 + _MAX_RESTRICTED_GAP):
            return found
        return self._solve_integers(cost, rows, least, upper, max_nodes)

    def _solve_integers(self, cost: Floats, rows: Rows, lower: Floats, upper: Floats, max_nodes: int) -> OptimizeResult:
        """Solve the programme with integral decisions between `lower` and `upper`."""
        integrality = np.zeros(rows.n_variables)
        integrality[self.model.binary] = 1
        return minimize(
            cost,
            rows,
            upper,
            deadline=self.deadline,
            lower=lower,
            integrality=integrality,
            node_limit=max_nodes,
            mip_rel_gap=self.relative_gap,
        )

    def _add_events(self, simulation: Simulation) -> bool:
        """Add rows at events with too many bytes. Return whether there are new ones."""
        overfull = [event for event, _ in _overfull_events(simulation, self.budget_bytes)]
        new = [event for event in overfull if event not in self._events]
        self._events.update((event, _EventRow()) for event in new)
        return bool(new)

    def _tighten_or_add_events(self, simulation: Simulation) -> None:
        for event, excess_bytes in _overfull_events(simulation, self.budget_bytes):
            if event in self._events:
                self._events[event].tighten(event, excess_bytes)
            else:
                self._events[event] = _EventRow()

    def _overestimates(self, event: Event) -> bool:
        """Return whether the row of this event may count more bytes than a plan has alive."""
        row = self._events[event]
        # An optimistic row counts the rise bytes during replays too, although backward allocates them afterwards.
        counts_rise = event.phase == "unpack" and self.model.problem.rise_bytes[event.index] > 0
        return row.safe or row.margin_bytes > 0 or counts_rise


def _decisions(model: Formulation, x: Floats) -> Decisions:
    """Return the decisions of a solution, from the last op to the first.

    An op is recomputed if it is needed and neither held nor stored. An op that is not needed counts as kept; its
    outputs are not held.
    """
    problem = model.problem
    keep = [True] * problem.n_ops
    offload = set()
    needed = list(problem.saved)
    for j in range(problem.n_ops - 1, -1, -1):
        if not model.relevant[j] or x[model.held(j)] > 0.5 or not any(needed[v] for v in problem.outputs[j]):
            continue
        if problem.offloadable[j] and x[model.stored(j)] > 0.5:
            offload.add(j)
        elif not problem.pinned[j]:
            keep[j] = False
            for v in problem.inputs[j]:
                needed[v] = True
    return [bool(kept) for kept in problem.effective_decisions(keep)], frozenset(offload)


def _overfull_events(simulation: Simulation, budget_bytes: int) -> list[tuple[Event, float]]:
    """Return the events with most bytes above the budget, and these bytes, largest first."""
    found: list[tuple[Event, float]] = []
    for phase, live_bytes in (("forward", simulation.forward_live), ("unpack", simulation.unpack_live)):
        found += [(Event(phase, k), excess) for k, excess in _largest_excesses(live_bytes, budget_bytes)]
    return sorted(found, key=lambda item: -item[1])[:_EVENTS_PER_ROUND]


def _largest_excesses(live_bytes: Bytes, budget_bytes: int) -> list[tuple[int, float]]:
    """Return the indices with most bytes above the budget, at some distance from each other."""
    excess = live_bytes - budget_bytes
    distance = max(1, len(live_bytes) // 32)
    picked: list[tuple[int, float]] = []
    while len(picked) < _EVENTS_PER_ROUND and len(excess) and excess.max() > 0:
        k = int(excess.argmax())
        picked.append((k, float(excess[k])))
        excess[max(0, k - distance) : k + distance + 1] = 0
    return picked
