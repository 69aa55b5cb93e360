"""A lower bound on the time of any exact plan: linear relaxations, with rows that always hold.

Valid for every plan that the engine can follow, however often it replays: a value that autograd will ask for is held
into backward or replayed at least once; what is held takes its bytes from the moment that nobody else holds
it, and what has been asked and will be asked again is there either way.

Backward is then cut into stages at its fullest asks (`stages`), for what has to be there in its middle; with time, also
where what the stages would do does not fit. Not tight where the peak is made inside a replay. Rows of bytes are added
where the relaxed solution breaks them. HiGHS solves the programmes; when time runs out, what is proved so far is
returned.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp

from .candidate import judged
from .formulation import Formulation
from .problem import Problem
from .rows import Place, Rows
from .simulator import Bytes, Simulator
from .stages import Decided, Stages

_ROUNDS = 6
_PLACES_A_ROUND = 6
_CUTS = 2  # with more, shares of replays in each stage weaken the bound again; whole values do not, but take longer
_SLOWER = 2  # how much longer the next programme takes that has a cut more, more or less
_CROWDED = 16  # asks at which what is kept has to fit, which costs next to nothing
_INFEASIBLE = 2
_ROUNDING = 1 - 1e-9  # what HiGHS may be wrong by


@dataclass(frozen=True)
class Bound:
    """What no plan can beat."""

    step_s: float
    impossible: bool
    """No schedule at all fits into the budget."""
    decided: Decided | None = None
    """What would take just that, if it fits: the programme has not looked everywhere."""


def lower_bound(
    problem: Problem,
    budget_bytes: int,
    *,
    deadline: float | None = None,
    ask_live: Bytes | None = None,
    whole: bool = False,
) -> Bound:
    """A proved lower bound on the time of a step whose peak is at most `budget_bytes`.

    `ask_live`: by ask what is alive by the best plan so far, as it is the places where that is full that say most; by
    default what keeping everything would take. `whole`: a better bound, from values that are there or not; shares of
    them are quicker. It wants a deadline.
    """
    plain_s = problem.trace.step_s
    if not problem.n_asks:
        return Bound(plain_s, impossible=False)
    model = Formulation(problem)
    if not model.n_variables:
        return Bound(plain_s, impossible=False)
    keep_all = Simulator(problem).run(problem.keep_all())
    until = math.inf if deadline is None else deadline
    best_s, places = _whole_step(model, budget_bytes, until)
    decided: Decided | None = None
    if best_s is not None and time.monotonic() < until:
        live = keep_all.ask_live if ask_live is None else ask_live
        places |= {Place("ask", k) for k in _fullest(live, _CROWDED)}
        cuts = _fullest(live, _CUTS)
        best_s, decided = _in_stages(model, budget_bytes, places, cuts, best_s, until, whole)
    if best_s is None:
        return Bound(plain_s, impossible=True)
    if keep_all.peak_bytes > budget_bytes:  # so that something is to be noted, whatever it is
        best_s += problem.trace.attending_s
    return Bound(plain_s + best_s + problem.trace.copying_s, impossible=False, decided=decided)


def _in_stages(
    model: Formulation,
    budget_bytes: int,
    places: set[Place],
    cuts: list[int],
    best_s: float,
    until: float,
    whole: bool,
) -> tuple[float | None, Decided | None]:
    """The least extra time by what must be there from stage to stage (None: nothing fits), and how."""
    simulator = Simulator(model.problem)
    ordered = sorted(places, key=lambda place: (place.phase, place.index))
    while True:
        began = time.monotonic()
        answer = Stages(model, budget_bytes, ordered, cuts).answer(until, whole=whole)
        if answer is None:
            return None, None
        best_s = max(best_s, answer.least_s * _ROUNDING)
        now = time.monotonic()
        if answer.decided is None or math.isinf(until) or now + _SLOWER * (now - began) > until:
            return best_s, answer.decided
        fullest = _too_full(simulator, answer.decided, budget_bytes, cuts)
        if fullest is None:
            return best_s, answer.decided
        cuts = [*cuts, fullest]


def _too_full(simulator: Simulator, decided: Decided, budget_bytes: int, cuts: list[int]) -> int | None:
    """The ask at which most bytes too many would be alive by these decisions, if there is one, and no cut yet."""
    found = judged(
        simulator, decided.keep, turns=decided.turns, offload=decided.offload, room_bytes=budget_bytes, solver="stages"
    )
    if found is None:
        return None
    live = found.simulation.ask_live.copy()
    live[cuts] = 0
    fullest = int(live.argmax())
    return fullest if live[fullest] > budget_bytes else None


def _whole_step(model: Formulation, budget_bytes: int, until: float) -> tuple[float | None, set[Place]]:
    """The least extra time by what must be held (None: that cannot fit), and where that is too much."""
    problem = model.problem
    rows = Rows()
    model.structure(rows, after=-1)
    places = {Place("ask", 0), Place("forward", problem.n_ops - 1)}
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


def _broken(model: Formulation, x: np.ndarray[tuple[int], np.dtype[np.float64]], budget_bytes: int) -> set[Place]:
    """The places at which the relaxed solution holds the most bytes too many."""
    found: list[tuple[float, Place]] = []
    for phase, live in zip(("forward", "ask"), model.certain_bytes(x), strict=True):
        excess = live - budget_bytes * (1 + 1e-7)
        for k in np.argsort(-excess)[: 4 * _PLACES_A_ROUND]:
            if excess[k] > 0 and not any(p.phase == phase and abs(p.index - int(k)) < 3 for _, p in found):
                found.append((float(excess[k]), Place(phase, int(k))))
    return {place for _, place in sorted(found, key=lambda item: -item[0])[:_PLACES_A_ROUND]}
