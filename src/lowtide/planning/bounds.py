"""A lower bound on the time of any exact plan: an LP relaxation.

Valid for every plan that the engine can follow, also with several replays of one op. A saved value is held into
backward or replayed at least once; a held value takes its bytes from the end of its natural lifetime on. Byte rows
are added where the relaxed solution breaks them. Backward is then cut into stages at its fullest asks (`stages`).
Not tight where the peak is inside a replay.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from .formulation import Formulation
from .problem import Problem
from .rows import Event, Rows
from .simulator import Bytes, Simulator
from .stages import Stages

_ROUNDS = 6
_PLACES_A_ROUND = 6
_CUTS = 2
"""Cuts of backward. Doubled: the bound gets weaker, because shares of replays spread over the stages."""
_CROWDED = 16
"""Asks at which the held values have to fit. Doubled: the same bound in a little more time."""
_INFEASIBLE = 2
_ROUNDING = 1 - 1e-9  # what HiGHS may be wrong by


@dataclass(frozen=True)
class Bound:
    """What no plan can beat."""

    step_s: float
    impossible: bool
    """No schedule at all fits into the budget."""


def lower_bound(
    problem: Problem, budget_bytes: int, *, deadline: float | None = None, unpack_live: Bytes | None = None
) -> Bound:
    """Return a proven lower bound on the time of a step whose peak is at most `budget_bytes`.

    `unpack_live`: live bytes by unpack under a good plan; backward is cut where most are alive. By default those
    of keeping everything. `deadline` is a safety net.
    """
    plain_s = problem.trace.step_s
    model = Formulation(problem)
    if not problem.n_unpacks or not model.n_variables:
        return Bound(plain_s, impossible=False)
    until = math.inf if deadline is None else deadline
    best_s, places = _whole_step(model, budget_bytes, until)
    if best_s is not None and time.monotonic() < until:
        live = Simulator(problem).run(problem.keep_all()).unpack_live if unpack_live is None else unpack_live
        places |= {Event("unpack", k) for k in _fullest(live, _CROWDED)}
        ordered = sorted(places, key=lambda place: (place.phase, place.index))
        staged_s = Stages(model, budget_bytes, ordered, _fullest(live, _CUTS)).least_s(until)
        best_s = None if staged_s is None else max(best_s, staged_s * _ROUNDING)
    if best_s is None:
        return Bound(plain_s, impossible=True)
    return Bound(plain_s + best_s + problem.trace.copying_s, impossible=False)


def _whole_step(model: Formulation, budget_bytes: int, until: float) -> tuple[float | None, set[Event]]:
    """Return the least extra time, or None if the values that must be held cannot fit; and the rows' places."""
    problem = model.problem
    rows = Rows()
    model.structure(rows, after=-1)
    places = {Event("unpack", 0), Event("forward", problem.n_ops - 1)}
    pending = set(places)
    best_s = 0.0
    for _ in range(_ROUNDS):
        for place in sorted(pending, key=lambda place: (place.phase, place.index)):
            terms, fixed = model.certain_terms(place)
            rows.add(terms, -np.inf, (budget_bytes - fixed) / model.byte_unit)
        found = _relaxed(model, rows, until)
        if found.status == _INFEASIBLE:
            return None, set()
        if found.status != 0:
            break
        best_s = max(best_s, float(found.fun) * model.time_unit * _ROUNDING)
        pending = _broken(model, found.x, budget_bytes) - places
        if not pending or time.monotonic() > until:
            break
        places |= pending
    return best_s, places


def _relaxed(model: Formulation, rows: Rows, until: float) -> OptimizeResult:
    count = model.n_variables
    left_s = until - time.monotonic()
    return milp(
        model.cost(),
        constraints=LinearConstraint(rows.matrix(count), rows.low, rows.high),
        bounds=Bounds(0, model.upper()),
        options={"time_limit": max(0.05, left_s)} if math.isfinite(left_s) else {},
    )


def _fullest(live: Bytes, count: int) -> list[int]:
    """The asks at which most is alive, apart from each other."""
    picked: list[int] = []
    for k in np.argsort(-live, kind="stable"):
        if all(abs(int(k) - other) > len(live) // 40 for other in picked):
            picked.append(int(k))
        if len(picked) == count:
            break
    return picked


def _broken(model: Formulation, x: np.ndarray[tuple[int], np.dtype[np.float64]], budget_bytes: int) -> set[Event]:
    """The places at which the relaxed solution holds the most bytes too many."""
    found: list[tuple[float, Event]] = []
    for phase, live in zip(("forward", "unpack"), model.certain_bytes(x), strict=True):
        excess = live - budget_bytes * (1 + 1e-7)
        for k in np.argsort(-excess)[: 4 * _PLACES_A_ROUND]:
            if excess[k] > 0 and not any(p.phase == phase and abs(p.index - int(k)) < 3 for _, p in found):
                found.append((float(excess[k]), Event(phase, int(k))))
    return {place for _, place in sorted(found, key=lambda item: -item[0])[:_PLACES_A_ROUND]}
