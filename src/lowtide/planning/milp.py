"""Plans from a mixed integer programme on HiGHS, with rows of bytes added where the simulator finds too many.

Solve, simulate, add the violated places, solve again; at first with shares of decisions, which is quick. Optimal
(within `relative_gap`) among plans that recompute every op at most once, where the model is right about what is alive;
where it is not, the row is made safe and then tightened until the simulator accepts, so a plan that is returned always
fits. It may miss plans that need an op replayed twice, and where the model is too careful.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from .formulation import Formulation
from .problem import Problem
from .rows import Event, Floats, Rows
from .simulator import Bytes, Simulation, Simulator
from .solver_output import to_standard_error

_PLACES_A_ROUND = 4
_SCOUTING_ROUNDS = 8
"""How often shares of decisions are allowed at first: that takes milliseconds, and shows where rows will be needed."""


@dataclass
class _Row:
    """How a place is treated: its state in the loop of tightening."""

    reach: int
    """How many asks ahead a replay may reach."""
    safe: bool = False
    margin_bytes: float = 0.0

    def tighten(self, place: Event, excess: float) -> None:
        """The simulator found more bytes than this row: make the row safe, then add a margin."""
        if place.phase == "unpack" and not self.safe:
            self.safe = True
        else:
            self.margin_bytes += excess


Decisions = tuple[list[bool], frozenset[int]]  # what is kept, and what of that is offloaded


@dataclass(frozen=True, eq=False)
class MilpResult:
    """The best plan found, if any, and what is known about better ones."""

    keep: list[bool] | None
    offload: frozenset[int]
    simulation: Simulation | None
    optimal: bool
    """The plan is within the gap of the best that the model allows, no row of which had to be tightened."""
    rounds: int
    misses: tuple[Decisions, ...]
    """What the model allowed and the simulator did not, oldest first: to be mended by others."""


def solve_milp(
    simulator: Simulator,
    budget_bytes: int,
    *,
    ties: Sequence[int] | None = None,
    deadline: float,
    relative_gap: float = 0.002,
    reach_unpacks: int | None = None,
    better_than_s: float | None = None,
    anchors: Sequence[int] = (),
    max_nodes: int = 2_000,
    max_rounds: int = 40,
) -> MilpResult:
    """Search for at most `max_rounds` rounds of `max_nodes` nodes. `deadline` (`time.monotonic()`) is a safety net.

    `better_than_s`: extra time that a plan must beat. `anchors`: ops that are to be held in any case.
    `reach_unpacks`: how many asks ahead a replay may reach.
    """
    problem = simulator.problem
    model = Formulation(problem, ties)
    reach = problem.n_unpacks if reach_unpacks is None else reach_unpacks
    places: dict[Event, _Row] = {}
    if problem.n_unpacks:
        places[Event("unpack", 0)] = _Row(reach)
    if not model.n_variables:  # nothing to decide
        keep = problem.keep_all()
        simulation = simulator.run(keep)
        fits = simulation.peak_bytes <= budget_bytes
        at_once: tuple[Decisions, Simulation] = ((keep, frozenset()), simulation)
        return _result(at_once if fits else None, optimal=fits, rounds=0, misses=[])
    structure_cost = model.cost()
    best: tuple[Decisions, Simulation] | None = None
    rounds = 0
    misses: list[Decisions] = []
    scouting = _SCOUTING_ROUNDS
    while rounds < max_rounds and time.monotonic() < deadline:
        rounds += 1
        rows = Rows()
        count = model.n_variables

        def new() -> int:
            nonlocal count
            count += 1
            return count - 1

        model.structure(rows)
        for place, row in places.items():
            model.bytes_row(rows, place, budget_bytes - row.margin_bytes, safe=row.safe, reach=row.reach, new=new)
        waiting = model.waiting_rows(rows, new)
        cost = np.zeros(count)
        cost[: model.n_variables] = structure_cost
        for variable, unit_s in waiting:
            cost[variable] = unit_s / model.time_unit
        if better_than_s is not None:
            terms = {int(c): float(cost[c]) for c in np.flatnonzero(cost)}
            fixed_s = problem.trace.copying_s
            rows.add(terms, -np.inf, (better_than_s - fixed_s) / model.time_unit)
        cost[: model.n_classes] += 1e-7  # holding what nobody needs is not free
        upper = np.ones(count)
        upper[: model.n_variables] = model.upper()
        for j in anchors:
            if model.relevant[j]:
                rows.add(model.there(j), 1.0, np.inf)
        integrality = np.zeros(count)
        integrality[model.binary] = not scouting
        with to_standard_error():
            found = milp(
                cost,
                constraints=LinearConstraint(rows.matrix(count), rows.low, rows.high),
                integrality=integrality,
                bounds=Bounds(0, upper),
                options={
                    "time_limit": max(0.05, deadline - time.monotonic()),
                    "node_limit": max_nodes,
                    "mip_rel_gap": relative_gap,
                },
            )
        if scouting and found.x is not None:
            crowded = _crowded(simulator, model, found.x, budget_bytes) - places.keys()
            places.update((place, _Row(reach)) for place in crowded)
            scouting = scouting - 1 if crowded else 0
            continue
        if found.x is None:
            return _result(best, optimal=False, rounds=rounds, misses=misses)
        keep, offload = decisions = _decisions(model, found.x)
        simulation = simulator.run(keep, offload=offload, limit_bytes=budget_bytes)
        if simulation.peak_bytes <= budget_bytes:
            if best is None or simulation.extra_s < best[1].extra_s:
                best = (decisions, simulation)
            exact = not any(row.safe or row.margin_bytes or _is_rough(problem, at) for at, row in places.items())
            return _result(best, optimal=found.status == 0 and exact, rounds=rounds, misses=misses)
        misses.append(decisions)
        for place, excess in _violated(simulation, budget_bytes):
            if place in places:
                places[place].tighten(place, excess)
            else:
                places[place] = _Row(reach)
    return _result(best, optimal=False, rounds=rounds, misses=misses)


def _result(
    best: tuple[Decisions, Simulation] | None,
    *,
    optimal: bool,
    rounds: int,
    misses: list[Decisions],
) -> MilpResult:
    if best is None:
        return MilpResult(None, frozenset(), None, optimal, rounds, tuple(misses))
    (keep, offload), simulation = best
    return MilpResult(keep, offload, simulation, optimal, rounds, tuple(misses))


def _is_rough(problem: Problem, at: Event) -> bool:
    """Whether the row counts bytes during a replay that backward allocates only after it."""
    return at.phase == "unpack" and problem.rise_bytes[at.index] > 0


def _crowded(simulator: Simulator, model: Formulation, x: Floats, budget_bytes: int) -> set[Event]:
    """Where there would be too many bytes if shares were rounded to decisions."""
    keep, offload = _decisions(model, x)
    simulation = simulator.run(keep, offload=offload, limit_bytes=budget_bytes)
    return {place for place, _ in _violated(simulation, budget_bytes)}


def _decisions(model: Formulation, x: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Decisions:
    """Recompute what is neither held nor away and is needed; what nobody needs counts as kept, and is never held."""
    problem = model.problem
    keep = [True] * problem.n_ops
    away = set()
    needed = list(problem.saved)
    for j in range(problem.n_ops - 1, -1, -1):
        if not model.relevant[j] or x[model.s(j)] > 0.5 or not any(needed[v] for v in problem.outputs[j]):
            continue
        if problem.offloadable[j] and x[model.o(j)] > 0.5:
            away.add(j)
        elif not problem.pinned[j]:
            keep[j] = False
            for u in problem.inputs[j]:
                needed[u] = True
    return [bool(kept) for kept in problem.effective_decisions(keep)], frozenset(away)


def _violated(simulation: Simulation, budget_bytes: int) -> list[tuple[Event, float]]:
    """The worst places, apart from each other, where too many bytes are alive."""
    found: list[tuple[Event, float]] = []
    for phase, live in (("forward", simulation.forward_live), ("unpack", simulation.unpack_live)):
        found += [(Event(phase, k), excess) for k, excess in _worst(live, budget_bytes)]
    return sorted(found, key=lambda item: -item[1])[:_PLACES_A_ROUND]


def _worst(live: Bytes, budget_bytes: int) -> list[tuple[int, float]]:
    excess = live - budget_bytes
    picked: list[tuple[int, float]] = []
    apart = max(1, len(live) // 32)
    while len(picked) < _PLACES_A_ROUND and len(excess) and excess.max() > 0:
        k = int(excess.argmax())
        picked.append((k, float(excess[k])))
        excess = excess.copy()
        excess[max(0, k - apart) : k + apart + 1] = 0
    return picked
