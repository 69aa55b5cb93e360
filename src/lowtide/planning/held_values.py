"""Sums of bytes over the values that a plan can hold, as linear terms of a `Formulation`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .formulation import Formulation
from .problem import Problem
from .rows import Floats, Terms

_Ints = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


class HeldValues:
    """Arrays over the values that can be held into backward, and the bytes that no decision changes."""

    def __init__(self, model: Formulation) -> None:
        problem = model.problem
        self._model = model
        self.values = np.array([v for v in range(problem.n_values) if model.held_variable[v] >= 0], dtype=np.int64)
        self.held = self._select(model.held_variable)
        """V1 or V4."""
        self.bytes = np.array(problem.nbytes, dtype=np.float64)[self.values] / model.byte_unit
        """In units of `byte_unit`, as `residual_bytes`."""
        self.producer = self._select(problem.producer)
        self.natural_end = self._select(problem.natural_end)
        self.natural_last_unpack = self._select(problem.natural_last_unpack)
        self.first_unpack = self._select(problem.first_unpack)
        self.last_needed = self._select(model.last_needed)
        residual = [
            problem.residual_bytes(int(v)) if problem.offloadable[problem.producer[v]] and problem.saved[v] else 0
            for v in self.values
        ]
        self.residual_bytes = np.array(residual, dtype=np.float64) / model.byte_unit
        """Bytes that stay in memory while the value is stored: 0 unless it is saved and compressed."""
        self.stored = np.array(
            [model.stored(problem.producer[v]) if size else 0 for v, size in zip(self.values, residual, strict=True)],
            dtype=np.int64,
        )
        """V3, where `residual_bytes` is not 0."""
        self.natural_forward, self.natural_backward = _natural_bytes(problem)
        """By op and by unpack: bytes of values that are alive regardless of decisions."""

    def terms(self, alive: _Mask, stored: _Mask | None = None) -> Terms:
        """Return the bytes of the values in `alive` as far as they are held.

        Also counts the residual bytes of the values in `stored` (default: `alive`) as far as they are stored.
        """
        stored = alive if stored is None else stored
        n_variables = self._model.n_variables
        totals = np.bincount(self.held[alive], weights=self.bytes[alive], minlength=n_variables)
        totals += np.bincount(self.stored[stored], weights=self.residual_bytes[stored], minlength=n_variables)
        return {int(variable): float(totals[variable]) for variable in np.flatnonzero(totals)}

    def forward_terms(self, op: int) -> tuple[Terms, float]:
        """Return the bytes of held values while `op` runs in forward, and the bytes that no decision changes."""
        alive = (self.producer <= op) & (self.natural_end < op)
        return self.terms(alive), self.fixed_forward_bytes(op)

    def fixed_forward_bytes(self, op: int) -> float:
        """Return the live bytes at a forward op that no decision changes."""
        return float(self._model.problem.trace.ops[op].other_bytes + self.natural_forward[op])

    def fixed_backward_bytes(self, unpack: int) -> float:
        """Return the live bytes at an unpack that no decision changes."""
        return float(self._model.problem.trace.unpacks[unpack].other_bytes + self.natural_backward[unpack])

    def _select(self, by_value: list[int]) -> _Ints:
        return np.array(by_value, dtype=np.int64)[self.values]


def _natural_bytes(problem: Problem) -> tuple[Floats, Floats]:
    forward = np.zeros(problem.n_ops + 2)
    backward = np.zeros(problem.n_unpacks + 2)
    for v in range(problem.n_values):
        if problem.producer[v] < 0:
            continue
        forward[problem.producer[v]] += problem.nbytes[v]
        forward[min(problem.natural_end[v], problem.n_ops) + 1] -= problem.nbytes[v]
        if problem.natural_last_unpack[v] >= 0:
            backward[0] += problem.nbytes[v]
            backward[min(problem.natural_last_unpack[v], problem.n_unpacks) + 1] -= problem.nbytes[v]
    return np.cumsum(forward), np.cumsum(backward)
