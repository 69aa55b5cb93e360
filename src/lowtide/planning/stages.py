"""A lower bound on extra time, from an LP in which backward is cut into stages.

Any plan obeys the rows, however often it replays an op. The relaxation allows shares of values and ops, so the
minimum of the LP is a lower bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .formulation import Formulation
from .highs import INFEASIBLE, OPTIMAL, minimize
from .minimum_bytes import MinimumBytes
from .rows import Event, Rows, Terms

_ReplayVariable = Callable[[int, int], int]
"""V2 or V3, by stage and op."""


class Stages:
    """The LP. An op j, a value v and a stage p are indices. "Stored" means offloaded or compressed.

    The first stage begins when backward begins, every other one after the unpack in `cuts` has been resolved. A value
    is *fixed* while it has been unpacked and its handle is live: it is then in memory in any plan. The rows R1, R2, R6
    and R7 apply to values that are not fixed when stage p begins.

    Variables, between 0 and 1:

    V1. `alive[p, v]`: v is in memory when stage p begins. In stage 0: v is held into backward.
    V2. `replayed[p, j]`: j is replayed in stage p. 0 for pinned ops.
    V3. `replayed_from[p, j]`: j is replayed in stage p or later. Without it, half a replay in each of two stages would
        count as a whole one.
    V4. `stored[j]`: the outputs of j are stored. One variable for all stages.

    `available(p, v)` is `alive[p, v] + replayed[p, j] + stored[j]`, where j makes v. Minimize Σ replay time · V2 +
    Σ round trip time · V4, subject to these rows:

    R1. A saved value v whose next unpack is in stage p: `available(p, v) ≥ 1`
    R2. j reads v: `available(p, v) ≥ replayed[p, j]`
    R3. No output of j is unpacked in stage p: `replayed[p, j] ≤ Σ replayed[p, w]` over the ops w that read one
    R4. R1 and R2 for the rest of backward, with `replayed_from` in place of `replayed`
    R5. `replayed_from[p, j] ≤ Σ replayed[q, j]` over the stages q ≥ p
    R6. `alive[p + 1, v] ≤ available(p, v)`
    R7. The bytes of `alive[p, v]` when stage p > 0 begins ≤ budget
    R8. The bytes of `alive[0, v]` at an event ≤ budget: in forward, and in backward until v is first unpacked
    R9. A held value is kept: `alive[0, v] + replayed[p, j] ≤ 1` for the op that makes v and for ops that overwrite it
    R10. A held saved value stays alive until its first unpack: `alive[p, v] ≥ alive[0, v]`

    R9 and R10 do not apply to values whose natural lifetime reaches backward: they can be alive without being held.
    """

    def __init__(
        self,
        model: Formulation,
        minimum_bytes: MinimumBytes,
        budget_bytes: int,
        events: Iterable[Event],
        cuts: Sequence[int],
    ) -> None:
        problem = model.problem
        self._model = model
        self._minimum_bytes = minimum_bytes
        self._budget_bytes = budget_bytes
        self._starts = [-1, *sorted(cuts)]
        """By stage: the unpack after which it begins."""
        self._ops = [j for j in range(problem.n_ops) if model.relevant[j]]
        self._values = [v for j in self._ops for v in problem.outputs[j]]
        self._v1 = {v: i for i, v in enumerate(self._values)}
        self._v2 = {j: len(self._values) + i for i, j in enumerate(self._ops)}
        self._variables_per_stage = len(self._values) + 2 * len(self._ops)
        storable = [j for j in self._ops if problem.offloadable[j]]
        self._v4 = {j: self._variables_per_stage * len(self._starts) + i for i, j in enumerate(storable)}
        self._rows = Rows(self._variables_per_stage * len(self._starts) + len(storable))
        for stage in range(len(self._starts)):
            self._add_stage_rows(stage)
        for event in events:
            self._add_event_row(event)
        self._add_held_rows()

    def least_s(self, deadline: float) -> float | None:
        """Return the least extra time, or None if nothing fits. 0 if the solver does not finish by `deadline`."""
        problem, model = self._model.problem, self._model
        cost, upper = np.zeros(self._rows.n_variables), np.ones(self._rows.n_variables)
        for stage in range(len(self._starts)):
            for j in self._ops:
                replayed, replayed_from = self._replayed(stage, j), self._replayed_from(stage, j)
                cost[replayed] = problem.replay_s[j] / model.time_unit
                upper[replayed] = upper[replayed_from] = not problem.pinned[j]
        for j, stored in self._v4.items():
            cost[stored] = model.round_trip_s(j) / model.time_unit
        found = minimize(cost, self._rows, upper, deadline=deadline)
        if found.status == INFEASIBLE:
            return None
        return float(found.fun) * model.time_unit if found.status == OPTIMAL else 0.0

    # Variables

    def _alive(self, stage: int, value: int) -> int:
        return stage * self._variables_per_stage + self._v1[value]

    def _replayed(self, stage: int, op: int) -> int:
        return stage * self._variables_per_stage + self._v2[op]

    def _replayed_from(self, stage: int, op: int) -> int:
        return stage * self._variables_per_stage + len(self._ops) + self._v2[op]

    def _available(self, stage: int, value: int, replayed: _ReplayVariable) -> Terms:
        op = self._model.problem.producer[value]
        stored = {self._v4[op]: 1.0} if op in self._v4 else {}
        return {self._alive(stage, value): 1.0, replayed(stage, op): 1.0, **stored}

    def _is_fixed(self, value: int, unpack: int) -> bool:
        """Return whether the value has been unpacked by then and its handle is live."""
        problem = self._model.problem
        return problem.saved[value] and problem.first_unpack[value] <= unpack <= problem.handle_end[value]

    # Rows

    def _add_stage_rows(self, stage: int) -> None:
        n_unpacks, is_last = self._model.problem.n_unpacks, stage + 1 == len(self._starts)
        last_unpack = n_unpacks if is_last else self._starts[stage + 1]
        self._add_unpack_rows(stage, self._replayed, last_unpack)  # R1
        self._add_input_rows(stage, self._replayed)  # R2
        self._add_demand_rows(stage, last_unpack)  # R3
        self._add_unpack_rows(stage, self._replayed_from, n_unpacks)  # R4
        self._add_input_rows(stage, self._replayed_from)  # R4
        for j in self._ops:  # R5
            replays = {self._replayed(later, j): 1.0 for later in range(stage, len(self._starts))}
            self._rows.add(replays | {self._replayed_from(stage, j): -1.0}, 0.0, np.inf)
        if not is_last:
            for v in self._values:  # R6
                if not self._is_fixed(v, self._starts[stage]):
                    available = self._available(stage, v, self._replayed)
                    self._rows.add(available | {self._alive(stage + 1, v): -1.0}, 0.0, np.inf)
        if stage:
            self._add_stage_bytes_row(stage)

    def _add_unpack_rows(self, stage: int, replayed: _ReplayVariable, last_unpack: int) -> None:
        """Add R1 for the unpacks from the beginning of the stage until `last_unpack`."""
        problem, start = self._model.problem, self._starts[stage]
        for v in self._values:
            unpacks = problem.unpacks_of[v]
            i = bisect_right(unpacks, start)
            if problem.saved[v] and i < len(unpacks) and unpacks[i] <= last_unpack and not self._is_fixed(v, start):
                self._rows.add(self._available(stage, v, replayed), 1.0, np.inf)

    def _add_input_rows(self, stage: int, replayed: _ReplayVariable) -> None:
        """Add R2."""
        problem = self._model.problem
        for j in self._ops:
            for v in problem.inputs[j] if not problem.pinned[j] else ():
                if not self._is_fixed(v, self._starts[stage]):
                    self._rows.add(self._available(stage, v, replayed) | {replayed(stage, j): -1.0}, 0.0, np.inf)

    def _add_demand_rows(self, stage: int, last_unpack: int) -> None:
        """Add R3."""
        problem, start = self._model.problem, self._starts[stage]
        for j in self._ops:
            outputs = problem.outputs[j]
            if not any(start < k <= last_unpack for v in outputs for k in problem.unpacks_of[v]):
                readers = {w for v in outputs for w in problem.consumers[v] if w in self._v2}
                terms = {self._replayed(stage, w): 1.0 for w in readers}
                self._rows.add(terms | {self._replayed(stage, j): -1.0}, 0.0, np.inf)

    def _add_held_rows(self) -> None:
        """Add R9 and R10."""
        problem = self._model.problem
        stages = range(len(self._starts))
        overwriters: dict[int, list[int]] = {}
        for j in self._ops:
            for i in problem.overwritten_producers[j]:
                overwriters.setdefault(i, []).append(j)
        for v in self._values:
            if problem.natural_last_unpack[v] >= 0:
                continue
            held = self._alive(0, v)
            for j in (problem.producer[v], *overwriters.get(problem.producer[v], ())):
                for stage in stages if not problem.pinned[j] else ():
                    self._rows.add({held: 1.0, self._replayed(stage, j): 1.0}, -np.inf, 1.0)
            for stage in stages[1:]:
                if problem.saved[v] and self._starts[stage] < problem.first_unpack[v] < problem.n_unpacks:
                    self._rows.add({self._alive(stage, v): 1.0, held: -1.0}, 0.0, np.inf)

    def _add_stage_bytes_row(self, stage: int) -> None:
        """Add R7."""
        problem, start = self._model.problem, self._starts[stage]
        values = [v for v in self._values if not self._is_fixed(v, start) and problem.natural_last_unpack[v] < start]
        compressed = [v for v in values if problem.saved[v] and problem.last_unpack[v] > start]
        self._add_bytes_row(stage, values, compressed, self._minimum_bytes.fixed_bytes(Event("unpack", start)))

    def _add_event_row(self, event: Event) -> None:
        """Add R8."""
        problem, index = self._model.problem, event.index
        if event.phase == "forward":
            values = [v for v in self._values if problem.producer[v] <= index and problem.natural_end[v] < index]
        else:
            values = [
                v
                for v in self._values
                if problem.natural_last_unpack[v] < 0
                and problem.first_unpack[v] > index
                and (problem.saved[v] or not index)
            ]
        compressed = [v for v in values if problem.saved[v]]
        self._add_bytes_row(0, values, compressed, self._minimum_bytes.fixed_bytes(event))

    def _add_bytes_row(self, stage: int, values: list[int], compressed: list[int], fixed_bytes: float) -> None:
        """Limit the bytes of `values` in V1, and the residual bytes of `compressed` in V4."""
        problem, unit = self._model.problem, self._model.byte_unit
        terms = {self._alive(stage, v): problem.nbytes[v] / unit for v in values}
        for v in compressed:
            stored = self._v4.get(problem.producer[v])
            if stored is not None and problem.residual_bytes(v):
                terms[stored] = terms.get(stored, 0.0) + problem.residual_bytes(v) / unit
        self._rows.add(terms, -np.inf, (self._budget_bytes - fixed_bytes) / unit)
