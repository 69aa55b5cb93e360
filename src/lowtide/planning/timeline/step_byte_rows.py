"""Byte rows of the MILP for timelines: live bytes at one event are at most the budget (R10 of `StepFormulation`).

A value counts if others hold it; if it is held into the next stage that needs it; or, within a stage, if it has been
replayed and is still needed. Bytes that are alive only during the replays for one unpack are not counted by the usual
row. A safe row counts all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..rows import Rows, Terms
from .stage_table import StageTable
from .step_facts import StepFacts
from .step_formulation import StepFormulation

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ByteRow:
    """The live bytes at one event, in bytes: `fixed_bytes` and the terms."""

    terms: Terms
    replay_terms: Terms
    """Bytes that are alive only during replays."""
    fixed_bytes: float


class StepByteRows:
    """Makes the byte rows of one formulation."""

    def __init__(self, model: StepFormulation) -> None:
        self.model = model
        self.table: StageTable = model.table
        self.facts: StepFacts = model.facts
        self.fixed_bytes = natural_bytes(self.facts) + np.array(self.facts.other_bytes, dtype=float)
        """By event: the bytes that no decision changes."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._variables: list[int] = []
        self._bytes: list[int] = []
        for v in model.values():
            self._add_intervals(v)
        self._arrays: tuple[_Ints, _Ints, _Ints, _Ints] = (
            np.array(self._starts, dtype=np.int64),
            np.array(self._ends, dtype=np.int64),
            np.array(self._variables, dtype=np.int64),
            np.array(self._bytes, dtype=np.int64),
        )
        last_unpack = -1
        self._last_unpack = [-1] * self.facts.n_events
        for t in range(self.facts.n_events):
            if self.facts.op_at[t] < 0:
                last_unpack = t
            self._last_unpack[t] = last_unpack
        self._ops_of_stage: list[list[int]] = [[] for _ in self.table.first]
        for j in range(self.facts.n_ops - 1, -1, -1):  # readers first
            if not self.facts.pinned[j]:
                for stage in self.table.stages_of[j]:
                    self._ops_of_stage[stage].append(j)

    def _add_intervals(self, v: int) -> None:
        """Add the intervals in which v is alive if it is held: before each stage, and in a tail."""
        model, facts = self.model, self.facts
        j, nbytes = facts.producer[v], facts.nbytes[v]
        since = max(facts.op_event[j], facts.natural_end[v] + 1)
        for position, stage in enumerate(self.table.stages_of[j]):
            until = self.table.alive_until[v][stage]
            self._add(since, until, model.held_output[v][position], nbytes)
            since = max(since, until + 1)
        tail_end = self.table.tail_end[v]
        if tail_end >= since:
            self.fixed_bytes[since : tail_end + 1] += nbytes
            self._add(since, tail_end, model.recorded[j], -nbytes)
            since = tail_end + 1
        if v in model.recipe_holds:
            ends = (self.table.tail_end[o] for w in facts.consumers[v] for o in facts.outputs[w])
            self._add(since, max(ends), model.recipe_holds[v], nbytes)

    def _add(self, start: int, end: int, variable: int, nbytes: int) -> None:
        if start <= end and variable >= 0 and nbytes:
            self._starts.append(start)
            self._ends.append(end)
            self._variables.append(variable)
            self._bytes.append(nbytes)

    def at(self, event: int, rows: Rows) -> ByteRow:
        """Return the row at an event. Adds V6 and their rows."""
        starts, ends, variables, nbytes = self._arrays
        alive = (starts <= event) & (event <= ends)
        totals = np.bincount(variables[alive], weights=nbytes[alive], minlength=self.model.n_variables)
        terms = {int(variable): float(totals[variable]) for variable in np.flatnonzero(totals)}
        replay_terms: Terms = {}
        if self.table.stage_at[event] >= 0:
            self._add_replayed(event, rows, terms, replay_terms)
        return ByteRow(terms, replay_terms, float(self.fixed_bytes[event]))

    def _add_replayed(self, event: int, rows: Rows, terms: Terms, replay_terms: Terms) -> None:
        """Add the values that have been replayed in the stage of the event and are still needed in it."""
        model, facts, table = self.model, self.facts, self.table
        stage, unpack = table.stage_at[event], self._last_unpack[event]
        early: dict[int, int] = {}  # V6 by op
        for j in self._ops_of_stage[stage]:
            if facts.op_event[j] > event:
                continue
            is_unpacked = table.unpacked_first[j].get(stage, event + 1) <= unpack
            done = model.replayed[j][stage] if is_unpacked else early.get(j)
            if done is None:
                continue
            for u in facts.inputs[j]:
                i = facts.producer[u]
                if facts.pinned[i] or table.unpacked_first[i].get(stage, event + 1) <= unpack:
                    continue
                if i not in early:
                    early[i] = rows.new_variable()
                rows.add({early[i]: 1.0, done: -1.0, model.held_in(i, stage): 1.0}, 0.0, np.inf)
            for v in facts.outputs[j]:
                until = table.alive_until[v][stage]
                if until > event or (until == event and stage in table.unpacks_of[v]):
                    terms[done] = terms.get(done, 0.0) + facts.nbytes[v]
                elif until == event:
                    replay_terms[done] = replay_terms.get(done, 0.0) + facts.nbytes[v]


def natural_bytes(facts: StepFacts) -> npt.NDArray[np.float64]:
    """Return, by event, the bytes of values that others hold."""
    change = np.zeros(facts.n_events + 2)
    for v, end in enumerate(facts.natural_end):
        if facts.producer[v] >= 0:
            change[facts.op_event[facts.producer[v]]] += facts.nbytes[v]
            change[end + 1] -= facts.nbytes[v]
    total: npt.NDArray[np.float64] = np.cumsum(change)[: facts.n_events]
    return total
