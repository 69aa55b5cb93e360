"""A lower bound on the step time of any exact plan, from LP relaxations.

The bound holds for every plan that the engine can follow, also with several replays of one op.

1. The whole step (`_whole_step`): a saved value is held into backward, or replayed or restored at least once. Held
   values take memory (`minimum_bytes`). Byte rows are added where the solution holds too many bytes.
2. Backward in stages (`stages`): backward is cut at the unpacks with most live bytes. Usually tighter.

The bound is not tight if the peak is reached during replays.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from .formulation import Formulation
from .highs import INFEASIBLE, OPTIMAL, minimize
from .minimum_bytes import MinimumBytes
from .problem import Problem
from .rows import Event, Floats, Rows
from .simulator import Bytes, Simulator
from .stages import Stages

_ROUNDS = 6
"""Rounds of solving and adding byte rows. Doubled: the same bound in most cases."""
_EVENTS_PER_ROUND = 6
"""Events that get a row in one round."""
_CUTS = 2
"""Cuts of backward. Doubled: the bound gets weaker, because shares of replays spread over the stages."""
_FULL_UNPACKS = 16
"""Unpacks at which the staged bound limits held values. Doubled: the same bound in a little more time."""
_MAX_STAGED_OPS = 1_000
"""Ops above which backward is not cut into stages. Doubled: up to 5 s longer, a bound higher by 0.2 to 0.4 % of a
step on recurrent chains."""
_ROUNDING = 1 - 1e-9
"""Correction for the tolerance of HiGHS."""


@dataclass(frozen=True)
class Bound:
    """A lower bound on the step time of all plans within a budget."""

    step_s: float
    infeasible: bool
    """No plan fits into the budget."""


def lower_bound(
    problem: Problem, budget_bytes: int, *, deadline: float | None = None, unpack_live: Bytes | None = None
) -> Bound:
    """Return a proven lower bound on the time of a step whose peak is at most `budget_bytes`.

    `unpack_live` are the live bytes by unpack under a good plan, by default under keeping everything: backward is cut
    where they are highest. `deadline` (`time.monotonic()`) is a safety net.
    """
    plain_s = problem.trace.step_s
    model = Formulation(problem)
    if not problem.n_unpacks or not model.n_variables:
        return Bound(plain_s, infeasible=False)
    deadline = math.inf if deadline is None else deadline
    minimum_bytes = MinimumBytes(model)
    extra_s, events = _whole_step(model, minimum_bytes, budget_bytes, deadline)
    if extra_s is not None and problem.n_ops <= _MAX_STAGED_OPS and time.monotonic() < deadline:
        live = Simulator(problem).run(problem.keep_all()).unpack_live if unpack_live is None else unpack_live
        events |= {Event("unpack", k) for k in _fullest_unpacks(live, _FULL_UNPACKS)}
        cuts = _fullest_unpacks(live, _CUTS)
        staged_s = Stages(model, minimum_bytes, budget_bytes, _ordered(events), cuts).least_s(deadline)
        extra_s = None if staged_s is None else max(extra_s, staged_s * _ROUNDING)
    if extra_s is None:
        return Bound(plain_s, infeasible=True)
    return Bound(plain_s + extra_s + problem.trace.copying_s, infeasible=False)


def _whole_step(
    model: Formulation, minimum_bytes: MinimumBytes, budget_bytes: int, deadline: float
) -> tuple[float | None, set[Event]]:
    """Return the least extra time, or None if nothing fits, and the events that have byte rows."""
    rows = Rows(model.n_variables)
    model.add_structure(rows, unpacked_only=True)
    events = {Event("unpack", 0), Event("forward", model.problem.n_ops - 1)}
    new = set(events)
    extra_s = 0.0
    for _ in range(_ROUNDS):
        for event in _ordered(new):
            terms, fixed_bytes = minimum_bytes.terms(event)
            rows.add(terms, -np.inf, (budget_bytes - fixed_bytes) / model.byte_unit)
        found = minimize(model.cost(), rows, model.upper_limits(), deadline=deadline)
        if found.status == INFEASIBLE:
            return None, set()
        if found.status != OPTIMAL:
            break
        extra_s = max(extra_s, float(found.fun) * model.time_unit * _ROUNDING)
        new = _overfull_events(minimum_bytes, found.x, budget_bytes) - events
        if not new or time.monotonic() > deadline:
            break
        events |= new
    return extra_s, events


def _ordered(events: set[Event]) -> list[Event]:
    return sorted(events, key=lambda event: (event.phase, event.index))


def _fullest_unpacks(live_bytes: Bytes, count: int) -> list[int]:
    """Return `count` unpacks with most live bytes, at some distance from each other."""
    picked: list[int] = []
    for k in np.argsort(-live_bytes, kind="stable"):
        if all(abs(int(k) - other) > len(live_bytes) // 40 for other in picked):
            picked.append(int(k))
        if len(picked) == count:
            break
    return picked


def _overfull_events(minimum_bytes: MinimumBytes, x: Floats, budget_bytes: int) -> set[Event]:
    """Return the events at which the relaxed solution `x` exceeds the budget most."""
    found: list[tuple[float, Event]] = []
    for phase, live_bytes in zip(("forward", "unpack"), minimum_bytes.totals(x), strict=True):
        excess = live_bytes - budget_bytes * (1 + 1e-7)
        for k in np.argsort(-excess)[: 4 * _EVENTS_PER_ROUND]:
            near = any(event.phase == phase and abs(event.index - int(k)) < 3 for _, event in found)
            if excess[k] > 0 and not near:
                found.append((float(excess[k]), Event(phase, int(k))))
    return {event for _, event in sorted(found, key=lambda item: -item[0])[:_EVENTS_PER_ROUND]}
