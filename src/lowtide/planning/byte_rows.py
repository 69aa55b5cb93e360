"""Byte rows of the MILP: live bytes at one event are at most the budget (rows R5 to R7 of `Formulation`)."""

from __future__ import annotations

import numpy as np

from .formulation import Formulation
from .held_values import HeldValues
from .rows import Event, Rows, Terms, sum_terms

_MAX_GROUPS = 50
"""Groups of ops with a V5 in one row. Doubled: up to twice the time for long chains, plans within 0.4 % of a step."""


class ByteRows:
    """Makes the byte rows of one formulation.

    Some bytes are alive only while ops are replayed for one unpack. An optimistic row does not count them. A safe row
    counts all of them together. Neither is exact: the simulator judges the plans.

    V5 stands for a single op up to `max_unpacks_early` unpacks before its own first unpack. Before that, the ops of one
    group share it: a chain of tied blocks holds nothing or replays all of its blocks at once.
    """

    def __init__(self, model: Formulation, max_unpacks_early: int) -> None:
        self.model = model
        self.held = HeldValues(model)
        self.max_unpacks_early = max_unpacks_early
        problem = model.problem
        self.first_unpack = [
            min((problem.first_unpack[v] for v in outputs), default=problem.n_unpacks) for outputs in problem.outputs
        ]
        """By op: the first unpack of one of its outputs."""

    def add(self, rows: Rows, event: Event, budget_bytes: float, *, safe: bool) -> None:
        """Add an optimistic row R5 for `event`, with `safe` a safe row too, and the rows R6 and R7 that they need."""
        unit = self.model.byte_unit
        if event.phase == "forward":
            terms, fixed_bytes = self.held.forward_terms(event.index)
        else:
            row = _UnpackRow(self, rows, event.index)
            terms, fixed_bytes = row.terms, row.fixed_bytes
            if safe:
                # Replays are over before the backward node allocates its results, the rise bytes.
                rise_bytes = self.model.problem.rise_bytes[event.index]
                limit = (budget_bytes - fixed_bytes + rise_bytes) / unit
                rows.add(sum_terms([*terms.items(), *row.replay_terms]), -np.inf, limit)
        rows.add(terms, -np.inf, (budget_bytes - fixed_bytes) / unit)


class _UnpackRow:
    """The terms of R5 at unpack k. Adds the rows R6 and R7 for its variables V5 and V6."""

    def __init__(self, byte_rows: ByteRows, rows: Rows, k: int) -> None:
        held = byte_rows.held
        self._model = byte_rows.model
        self._problem = byte_rows.model.problem
        self._first_unpack = byte_rows.first_unpack
        self._last_near_unpack = k + byte_rows.max_unpacks_early
        self._rows = rows
        self._groups_left = _MAX_GROUPS
        self._k = k
        self._early: dict[tuple[str, int], int] = {}
        """V5, by op near k and by group of ops elsewhere."""
        self._fetched: dict[int, int] = {}
        """V6 by value."""
        alive = (held.last_needed >= k) & (held.natural_last_unpack < k)
        self.terms: Terms = held.terms(alive, stored=alive & (held.first_unpack > k))
        self.replay_terms: list[tuple[int, float]] = []
        """Bytes that are alive only during replays for this unpack."""
        self.fixed_bytes = held.fixed_backward_bytes(k)
        self._add_replayed_values()
        self._add_fetched_values()

    def _add_replayed_values(self) -> None:
        problem, model = self._problem, self._model
        for j in range(problem.n_ops - 1, -1, -1):  # a V5 exists before the op is reached: readers come first
            if not model.relevant[j] or problem.pinned[j]:
                continue
            done = self._done(j)
            if done is None:
                continue
            for v in problem.inputs[j]:
                self._add_input(v, done)
            for v in problem.outputs[j]:
                self._count(done, v)
            if problem.workspace_bytes[j] and self._first_unpack[j] == self._k:
                self.replay_terms.append((done, problem.workspace_bytes[j] / model.byte_unit))

    def _add_fetched_values(self) -> None:
        problem, model = self._problem, self._model
        for v, fetched in self._fetched.items():
            self._count(fetched, v)
        for j in range(problem.n_ops):
            if model.relevant[j] and problem.offloadable[j]:
                for v in problem.outputs[j]:
                    if problem.first_unpack[v] <= self._k:
                        self._count(model.stored(j), v)

    def _done(self, op: int) -> int | None:
        """Return the variable that says whether `op` has been replayed by k, or None if it cannot have been."""
        return self._model.replayed(op) if self._first_unpack[op] <= self._k else self._early.get(self._early_key(op))

    def _early_key(self, op: int) -> tuple[str, int]:
        """Return the key of the V5 of `op`."""
        near = self._model.replayed_by[op] <= self._last_near_unpack
        return ("op", op) if near else ("group", self._model.held(op))

    def _add_input(self, v: int, done: int) -> None:
        """Add R7 and R6 for an op that reads v and has been replayed if `done`."""
        problem, model = self._problem, self._model
        i = problem.producer[v]
        if problem.offloadable[i] and problem.first_unpack[v] > self._k:
            if v not in self._fetched:
                self._fetched[v] = self._rows.new_variable()
            terms = [(self._fetched[v], 1.0), (done, -1.0), (model.stored(i), -1.0)]
            self._rows.add(sum_terms(terms), -1.0, np.inf)  # R7
        if problem.pinned[i] or self._first_unpack[i] <= self._k:
            return
        key = self._early_key(i)
        if key not in self._early:
            if key[0] == "group":
                if not self._groups_left:
                    return
                self._groups_left -= 1
            self._early[key] = self._rows.new_variable()
        terms = [(self._early[key], 1.0), (done, -1.0), *model.held_or_stored(i).items()]
        self._rows.add(sum_terms(terms), 0.0, np.inf)  # R6

    def _count(self, variable: int, v: int) -> None:
        """Count the bytes of v at k if `variable` says that v is in memory, as far as v is still needed."""
        last_needed, units = self._model.last_needed[v], self._problem.nbytes[v] / self._model.byte_unit
        if last_needed > self._k or (last_needed == self._k and self._problem.saved[v]):
            self.terms[variable] = self.terms.get(variable, 0.0) + units
        elif last_needed == self._k:
            self.replay_terms.append((variable, units))
