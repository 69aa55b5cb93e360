"""A lower bound on replay time from backward cut into stages, at asks where memory is short.

What is there when a stage begins was there when the one before began, was asked for, or was replayed meanwhile; it fits
into the budget. What a stage is asked for it has, or replays from what it has, and it replays nothing else. What is
kept is kept for good, and fits wherever it has to be. Every plan obeys that, however often it replays an op; shares of
values and ops (a linear programme) are allowed, so the least time is a bound.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from .formulation import Formulation
from .rows import Event, Rows
from .solver_output import to_standard_error

_INFEASIBLE = 2
Replay = Callable[[int, int], int]
"""By stage and op: the variable that says that it is replayed."""


class Stages:
    """The programme. For each stage a variable for each value ("it is there when the stage begins") and two for each
    op ("it is replayed in it", "it is replayed at all from there on": or half a replay in each of two stages would be
    taken for a whole one); and, for all stages, one for each op whose values may be offloaded or compressed."""

    def __init__(self, model: Formulation, budget_bytes: int, places: Iterable[Event], cuts: Sequence[int]) -> None:
        problem = model.problem
        self._model = model
        self._budget_bytes = budget_bytes
        self._starts = [-1, *sorted(cuts)]  # each stage begins when this ask has been answered
        self._ops = [j for j in range(problem.n_ops) if model.relevant[j]]
        self._values = [v for j in self._ops for v in problem.outputs[j]]
        self._value_column = {v: c for c, v in enumerate(self._values)}
        self._op_column = {j: len(self._values) + c for c, j in enumerate(self._ops)}
        self._width = len(self._values) + 2 * len(self._ops)
        movable = [j for j in self._ops if problem.offloadable[j]]
        self._away_column = {j: self._width * len(self._starts) + c for c, j in enumerate(movable)}
        self._count = self._width * len(self._starts) + len(movable)
        self._rows = Rows()
        for stage in range(len(self._starts)):
            last = stage + 1 == len(self._starts)
            self._asked(stage, self._replay, problem.n_unpacks if last else self._starts[stage + 1])
            self._replayed(stage, self._replay)
            self._demanded(stage, problem.n_unpacks if last else self._starts[stage + 1])
            self._asked(stage, self._ever, problem.n_unpacks)
            self._replayed(stage, self._ever)
            self._in_some_stage(stage)
            if not last:
                self._passed_on(stage)
            if stage:
                self._fits(stage)
        for place in places:
            self._fits_at(place)
        self._kept()

    def least_s(self, until: float) -> float | None:
        """Return the least extra time, or None if nothing fits; 0 if `until` (`time.monotonic()`) passes first."""
        problem, model = self._model.problem, self._model
        cost, upper = np.zeros(self._count), np.ones(self._count)
        for stage in range(len(self._starts)):
            for j in self._ops:
                cost[self._replay(stage, j)] = problem.replay_overhead_s[j] / model.time_unit
                upper[self._replay(stage, j)] = upper[self._ever(stage, j)] = not problem.pinned[j]
        for j, column in self._away_column.items():
            cost[column] = model.move_s(j) / model.time_unit
        left_s = until - time.monotonic()
        with to_standard_error():
            found = milp(
                cost,
                constraints=LinearConstraint(self._rows.matrix(self._count), self._rows.low, self._rows.high),
                bounds=Bounds(0, upper),
                options={"time_limit": max(0.05, left_s)} if math.isfinite(left_s) else {},
            )
        if found.status == _INFEASIBLE:
            return None
        return float(found.fun) * model.time_unit if found.status == 0 else 0.0

    # -- variables ------------------------------------------------------------------------------------

    def _there(self, stage: int, value: int) -> int:
        return stage * self._width + self._value_column[value]

    def _replay(self, stage: int, op: int) -> int:
        return stage * self._width + self._op_column[op]

    def _ever(self, stage: int, op: int) -> int:
        return stage * self._width + len(self._ops) + self._op_column[op]

    def _had(self, stage: int, value: int, replay: Replay) -> dict[int, float]:
        """ "It is there, replayed or elsewhere": it can be had."""
        op = self._model.problem.producer[value]
        away = {self._away_column[op]: 1.0} if op in self._away_column else {}
        return {self._there(stage, value): 1.0, replay(stage, op): 1.0, **away}

    # -- rows -----------------------------------------------------------------------------------------

    def _asked(self, stage: int, replay: Replay, until: int) -> None:
        """What is asked for from a stage's beginning on is had."""
        problem, after = self._model.problem, self._starts[stage]
        for v in self._values:
            unpacks = problem.unpacks_of[v]
            later = bisect_right(unpacks, after)
            if problem.saved[v] and later < len(unpacks) and unpacks[later] <= until and not self._given(v, after):
                self._rows.add(self._had(stage, v, replay), 1.0, np.inf)

    def _replayed(self, stage: int, replay: Replay) -> None:
        """What a replay reads is had."""
        problem = self._model.problem
        for j in self._ops:
            for u in problem.inputs[j] if not problem.pinned[j] else ():
                if not self._given(u, self._starts[stage]):
                    self._rows.add(self._had(stage, u, replay) | {replay(stage, j): -1.0}, 0.0, np.inf)

    def _demanded(self, stage: int, until: int) -> None:
        """What a stage replays is asked for in it, or read by something else that it replays."""
        problem, after = self._model.problem, self._starts[stage]
        for j in self._ops:
            made = problem.outputs[j]
            if not any(after < k <= until for v in made for k in problem.unpacks_of[v]):
                readers = {w for v in made for w in problem.consumers[v] if w in self._op_column}
                terms = {self._replay(stage, w): 1.0 for w in readers}
                self._rows.add(terms | {self._replay(stage, j): -1.0}, 0.0, np.inf)

    def _in_some_stage(self, stage: int) -> None:
        """What is replayed at all is replayed in this stage or a later one."""
        for j in self._ops:
            stages = {self._replay(later, j): 1.0 for later in range(stage, len(self._starts))}
            self._rows.add(stages | {self._ever(stage, j): -1.0}, 0.0, np.inf)

    def _kept(self) -> None:
        """What is held into backward is never replayed, nor what was written over it, and stays until it is asked for.

        What lives until backward on its own may be there without being kept.
        """
        problem = self._model.problem
        stages = range(len(self._starts))
        overwriters: dict[int, list[int]] = {}
        for j in self._ops:
            for i in problem.over[j]:
                overwriters.setdefault(i, []).append(j)
        for v in self._values:
            if problem.natural_last_unpack[v] >= 0:
                continue
            held = {self._there(0, v): 1.0}
            for j in (problem.producer[v], *overwriters.get(problem.producer[v], ())):
                for stage in stages if not problem.pinned[j] else ():
                    self._rows.add(held | {self._replay(stage, j): 1.0}, -np.inf, 1.0)
            for stage in stages[1:]:
                if problem.saved[v] and self._starts[stage] < problem.first_unpack[v] < problem.n_unpacks:
                    self._rows.add({self._there(stage, v): 1.0, self._there(0, v): -1.0}, 0.0, np.inf)

    def _passed_on(self, stage: int) -> None:
        """What the next stage begins with this one had."""
        for v in self._values:
            if not self._given(v, self._starts[stage]):
                self._rows.add(self._had(stage, v, self._replay) | {self._there(stage + 1, v): -1.0}, 0.0, np.inf)

    def _fits(self, stage: int) -> None:
        """What a stage begins with fits."""
        problem, after = self._model.problem, self._starts[stage]
        there = [v for v in self._values if not self._given(v, after) and problem.natural_last_unpack[v] < after]
        resting = [v for v in there if problem.saved[v] and problem.last_unpack[v] > after]
        self._bytes_row(stage, there, resting, self._model.state_terms(after)[1])

    def _fits_at(self, place: Event) -> None:
        """What is held into backward fits: where forward holds it already, and in backward until it is asked for."""
        problem = self._model.problem
        if place.phase == "forward":
            there = [
                v for v in self._values if problem.producer[v] <= place.index and problem.natural_end[v] < place.index
            ]
        else:
            there = [
                v
                for v in self._values
                if problem.natural_last_unpack[v] < 0
                and problem.first_unpack[v] > place.index
                and (problem.saved[v] or not place.index)
            ]
        resting = [v for v in there if problem.saved[v]]
        self._bytes_row(0, there, resting, self._model.certain_terms(place)[1])

    def _bytes_row(self, stage: int, there: list[int], resting: list[int], fixed_bytes: float) -> None:
        problem, unit = self._model.problem, self._model.byte_unit
        terms = {self._there(stage, v): problem.nbytes[v] / unit for v in there}
        for v in resting:
            column = self._away_column.get(problem.producer[v])
            if column is not None and problem.residual_bytes(v):
                terms[column] = terms.get(column, 0.0) + problem.residual_bytes(v) / unit
        self._rows.add(terms, -np.inf, (self._budget_bytes - fixed_bytes) / unit)

    def _given(self, value: int, after: int) -> bool:
        """Whether a value has been asked for by then, and its handle is still there."""
        return self._model.answered(value, after)
