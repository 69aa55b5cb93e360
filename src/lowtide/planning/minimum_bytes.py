"""Live bytes that no exact plan avoids, given which values it holds into backward: for lower bounds."""

from __future__ import annotations

import numpy as np

from .formulation import Formulation
from .held_values import HeldValues
from .rows import Event, Floats, Terms


class MinimumBytes:
    """Minimum live bytes by event, as terms of a `Formulation`. Valid also for plans that replay ops repeatedly.

    - In forward a held value is alive from the end of its natural lifetime.
    - A held value is alive at the first unpack. If it is saved, it is alive until it is first unpacked.
    - From its first unpack until its handle is freed, a saved value is alive in any plan. These bytes are fixed.
    """

    def __init__(self, model: Formulation) -> None:
        problem = model.problem
        self._problem = problem
        self._byte_unit = model.byte_unit
        self._held = HeldValues(model)
        last = np.zeros(problem.n_values, dtype=np.int64)
        unpacked = np.zeros(problem.n_unpacks + 2)
        for v in range(problem.n_values):
            if not problem.saved[v]:
                continue
            last[v] = min(problem.first_unpack[v], problem.n_unpacks) - 1
            # Until its natural lifetime ends, the value is among the natural bytes.
            first = max(problem.first_unpack[v], problem.natural_last_unpack[v] + 1)
            if first <= problem.handle_end[v] and problem.first_unpack[v] < problem.n_unpacks:
                unpacked[first] += problem.nbytes[v]
                unpacked[min(problem.handle_end[v], problem.n_unpacks) + 1] -= problem.nbytes[v]
        self._last = last[self._held.values]
        """By held value: the last unpack at which it is alive if it is held."""
        self._unpacked_bytes: Floats = np.cumsum(unpacked)
        """By unpack: bytes of values that have been unpacked and whose handles are live."""

    def terms(self, event: Event) -> tuple[Terms, float]:
        """Return the bytes of held values at `event`, and the fixed bytes."""
        held = self._held
        if event.phase == "forward":
            return held.forward_terms(event.index)
        alive = (event.index <= self._last) & (held.natural_last_unpack < event.index)
        return held.terms(alive), self.fixed_bytes(event)

    def fixed_bytes(self, event: Event) -> float:
        """Return the live bytes at `event` that no decision changes."""
        if event.phase == "forward":
            return self._held.fixed_forward_bytes(event.index)
        return float(self._held.fixed_backward_bytes(event.index) + self._unpacked_bytes[event.index])

    def totals(self, x: Floats) -> tuple[Floats, Floats]:
        """Return the minimum live bytes by forward op and by unpack, for the variables `x` of the formulation."""
        problem, held = self._problem, self._held
        n, n_unpacks = problem.n_ops, problem.n_unpacks
        held_bytes = (x[held.held] * held.bytes + x[held.stored] * held.residual_bytes) * self._byte_unit
        forward = np.zeros(n + 1)
        np.add.at(forward, np.minimum(np.maximum(held.producer, held.natural_end + 1), n), held_bytes)
        backward = np.zeros(n_unpacks + 2)
        first = held.natural_last_unpack + 1
        some = first <= self._last
        np.add.at(backward, np.minimum(first[some], n_unpacks), held_bytes[some])
        np.subtract.at(backward, np.minimum(self._last[some], n_unpacks) + 1, held_bytes[some])
        forward_fixed = np.array([op.other_bytes for op in problem.trace.ops]) + held.natural_forward[:n]
        backward_fixed = np.array([unpack.other_bytes for unpack in problem.trace.unpacks], dtype=float)
        backward_fixed += held.natural_backward[:n_unpacks] + self._unpacked_bytes[:n_unpacks]
        return np.cumsum(forward)[:n] + forward_fixed, np.cumsum(backward)[:n_unpacks] + backward_fixed
