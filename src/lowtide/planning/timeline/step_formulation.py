"""The mixed integer programme for timelines: into which stages to hold values, and in which to replay ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..rows import Floats, Rows, sum_terms
from .decisions import KEPT, Decisions, all_stages, normalised
from .stage_table import StageTable


class StepFormulation:
    """Variables and rows of one table of stages, for plans that replay every op at most once in a stage.

    Ops i and j, a value v, stages p and q, and an event t are indices. All variables are between 0 and 1:

    V1. `held[j, p]`, binary: the outputs of j are held into stage p.
    V2. `replayed[j, p]`: j is replayed in stage p. 0 for pinned ops.
    V3. `recorded[j]`, binary: j has a recipe. Only for ops with a tail; other ops have one if they are not held into
        all stages.
    V4. `held_output[v, p]`: v is held into p. Only for unsaved outputs of ops with several outputs. Any other value is
        held if its op is.
    V5. `recipe_holds[v]`: after the last stage that needs v, a recorded op with a tail holds it as an input.
    V6. `early[j, t]`: j has been replayed by event t, and none of its outputs has been unpacked in this stage by t.

    Only V1 and V3 are binary. Minimize Σ replay time · V2, subject to these rows:

    R1. j is unpacked in p: `held[j, p] + replayed[j, p] ≥ 1`
    R2. j reads a value that i makes: `held[i, p] + replayed[i, p] ≥ replayed[j, p]`
    R3. no output of j is unpacked in p: `replayed[j, p] ≤ Σ replayed[w, p]` over the readers w
    R4. q follows p among the stages in which j matters: `held[j, q] ≤ held[j, p] + replayed[j, p]`
    R5. j overwrites a value that i makes: `held[i, p] + replayed[j, p] ≤ 1`; a source: `replayed[j, p] ≤ 0`
    R6. w reads v, an output of j with a V4, and q is p or later: `held_output[v, p] ≥ held[j, p] + replayed[w, q] - 1`;
        the same with `recorded[w]`
    R7. j has a tail: `recorded[j] ≥ 1 - held[j, p]` and `recorded[j] ≥ replayed[j, p]`
    R8. w with a tail reads v: `recipe_holds[v] ≥ recorded[w]`
    R9. memory that j reads is overwritten before it would be replayed in p: `replayed[j, p] ≤ 0`
    R10. Live bytes at one event ≤ budget (`step_byte_rows`).

    The variables of ops with equal labels in `ties` are shared.
    """

    def __init__(self, table: StageTable, ties: Sequence[int] | None = None) -> None:
        self.table = table
        facts = self.facts = table.facts
        self.ties = list(range(facts.n_ops)) if ties is None else list(ties)
        self.n_variables = 0
        self.byte_unit = max(1.0, max(facts.nbytes, default=1) / 1000.0)
        self.time_unit = max(sum(op.time_s for op in facts.trace.ops) / 1000.0, 1e-12)
        shared: dict[tuple[str, int, int], int] = {}

        def variable(kind: str, label: int, position: int) -> int:
            key = kind, label, position
            if key not in shared:
                shared[key] = self.n_variables
                self.n_variables += 1
            return shared[key]

        self.held: list[list[int]] = []
        """V1 by op and position of the stage."""
        self.replayed: list[dict[int, int]] = []
        """V2 by op and stage."""
        self.recorded: list[int] = [-1] * facts.n_ops
        """V3 by op, -1 if it has none."""
        for j in range(facts.n_ops):
            stages = table.stages_of[j]
            self.held.append([variable("held", self.ties[j], k) for k in range(len(stages))])
            self.replayed.append({p: variable("replayed", self.ties[j], k) for k, p in enumerate(stages)})
            if table.tailed[j] and not facts.pinned[j]:
                self.recorded[j] = variable("recorded", self.ties[j], 0)
        self.binary = sorted({*(x for held in self.held for x in held), *(x for x in self.recorded if x >= 0)})
        self.held_output: list[list[int]] = [[] for _ in range(facts.n_values)]
        """V4, or the V1 of the op, by value and position of the stage; -1 if no plan holds the value."""
        self._own_v4: list[tuple[int, int]] = []  # value and position of the stage
        self.recipe_holds: dict[int, int] = {}
        """V5 by value."""
        for v in range(facts.n_values):
            self._add_value(v)

    def _add_value(self, v: int) -> None:
        facts, j = self.facts, self.facts.producer[v]
        if j < 0:
            return
        readers = [w for w in facts.consumers[v] if not facts.pinned[w]]
        last = max((max(self.replayed[w], default=-1) for w in readers), default=-1)
        tailed = any(self.recorded[w] >= 0 for w in readers)
        for k, p in enumerate(self.table.stages_of[j]):
            if facts.handles[v] or len(facts.outputs[j]) == 1:
                self.held_output[v].append(self.held[j][k])
            elif last >= p or tailed:
                self.held_output[v].append(self._new_variable())
                self._own_v4.append((v, k))
            else:
                self.held_output[v].append(-1)
        if tailed and (self.recorded[j] < 0 or self.table.tail_end[v] < 0):
            self.recipe_holds[v] = self._new_variable()

    def _new_variable(self) -> int:
        self.n_variables += 1
        return self.n_variables - 1

    def held_in(self, op: int, stage: int) -> int:
        """Return V1 of an op for a stage in which it matters."""
        return self.held[op][self.table.stages_of[op].index(stage)]

    def upper_limits(self) -> Floats:
        """Return the upper limits of V1 to V5."""
        upper = np.ones(self.n_variables)
        for j, by_stage in enumerate(self.replayed):
            for stage, variable in by_stage.items():
                if self.facts.pinned[j] or self.table.replayed_by[j][stage] >= self.facts.reads_until[j]:
                    upper[variable] = 0.0  # R9
        return upper

    def cost(self) -> Floats:
        """Return the time of replays by variable (V1 to V5), in units of `time_unit`."""
        cost = np.zeros(self.n_variables)
        for j, by_stage in enumerate(self.replayed):
            for variable in by_stage.values():
                cost[variable] += self.facts.replay_s[j] / self.time_unit
        return cost

    # Rows

    def add_structure(self, rows: Rows) -> None:
        """Add rows R1 to R8."""
        for j in range(self.facts.n_ops):
            for position, stage in enumerate(self.table.stages_of[j]):
                self._add_stage_rows(rows, j, position, stage)
                if not self.facts.pinned[j]:
                    self._add_replay_rows(rows, j, stage)
        for v, position in self._own_v4:
            self._add_output_rows(rows, v, position)
        for v, variable in self.recipe_holds.items():
            for w in self.facts.consumers[v]:
                if self.recorded[w] >= 0:
                    rows.add(sum_terms([(variable, 1.0), (self.recorded[w], -1.0)]), 0.0, np.inf)  # R8

    def _add_stage_rows(self, rows: Rows, j: int, position: int, stage: int) -> None:
        held, replayed = self.held[j][position], self.replayed[j][stage]
        if stage in self.table.unpacked_first[j]:
            rows.add({held: 1.0, replayed: 1.0}, 1.0, np.inf)  # R1
        if position + 1 < len(self.held[j]):
            rows.add({self.held[j][position + 1]: 1.0, held: -1.0, replayed: -1.0}, -np.inf, 0.0)  # R4
        if self.recorded[j] >= 0:
            rows.add({self.recorded[j]: 1.0, held: 1.0}, 1.0, np.inf)  # R7
            rows.add({self.recorded[j]: 1.0, replayed: -1.0}, 0.0, np.inf)  # R7

    def _add_replay_rows(self, rows: Rows, j: int, stage: int) -> None:
        """Add the rows R2, R3 and R5 for a replay of `j` in a stage."""
        facts, replayed = self.facts, self.replayed[j][stage]
        if stage not in self.table.unpacked_first[j]:
            readers = [
                (self.replayed[w][stage], -1.0)
                for v in facts.outputs[j]
                for w in facts.consumers[v]
                if not facts.pinned[w] and stage in self.replayed[w]
            ]
            terms = sum_terms([(replayed, 1.0), *readers])
            if terms.get(replayed, 0.0) > 0:
                rows.add(terms, -np.inf, 0.0)  # R3
        for i in facts.overwritten_producers[j]:
            if i < 0:
                rows.add({replayed: 1.0}, -np.inf, 0.0)  # R5
            else:
                rows.add({self.held_in(i, stage): 1.0, replayed: 1.0}, -np.inf, 1.0)  # R5
        for u in facts.inputs[j]:
            i = facts.producer[u]
            if self.replayed[i][stage] != replayed:
                terms = {self.held_in(i, stage): 1.0, self.replayed[i][stage]: 1.0, replayed: -1.0}
                rows.add(terms, 0.0, np.inf)  # R2

    def _add_output_rows(self, rows: Rows, v: int, position: int) -> None:
        j = self.facts.producer[v]
        held, output = self.held[j][position], self.held_output[v][position]
        stage = self.table.stages_of[j][position]
        for w in self.facts.consumers[v]:
            if self.facts.pinned[w]:
                continue
            users = [variable for q, variable in self.replayed[w].items() if q >= stage]
            for user in (*users, *([self.recorded[w]] if self.recorded[w] >= 0 else [])):
                rows.add(sum_terms([(output, 1.0), (held, -1.0), (user, -1.0)]), -1.0, np.inf)  # R6

    # Solutions

    def decisions(self, x: Floats) -> Decisions:
        """Return the decisions of a solution.

        From the last op to the first: an op that no stage replays, that no recipe reads and of which autograd saves
        nothing is kept. A saved value that no stage unpacks can be dropped, so its op may be recorded.
        """
        table, facts = self.table, self.facts
        result = [KEPT] * facts.n_ops
        needed: list[set[int]] = [set(by_stage) for by_stage in table.unpacks_of]  # by value: the stages
        read = [False] * facts.n_values  # by value: a recipe reads it
        for j in range(facts.n_ops - 1, -1, -1):
            if facts.pinned[j]:
                continue
            bits = sum(1 << k for k, held in enumerate(self.held[j]) if x[held] > 0.5)
            is_read = any(read[v] for v in facts.outputs[j])
            replays = [
                p
                for k, p in enumerate(table.stages_of[j])
                if not bits >> k & 1 and any(p in needed[v] for v in facts.outputs[j])
            ]
            if self.recorded[j] >= 0:
                is_recorded = bool(replays) or x[self.recorded[j]] > 0.5
            else:
                is_saved = any(facts.handles[v] for v in facts.outputs[j])
                is_recorded = bits != all_stages(table, j) and (bool(replays) or is_read or is_saved)
            if is_recorded:
                result[j] = bits
                for u in facts.inputs[j]:
                    read[u] = True
                    needed[u].update(replays)
        return normalised(table, result)

    def values(self) -> Iterator[int]:
        """Yield the values that ops make."""
        return (v for v in range(self.facts.n_values) if self.facts.producer[v] >= 0)
