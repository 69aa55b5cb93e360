"""Linear constraints: sparse rows over numbered variables, and the events at which rows limit live bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import LinearConstraint
from scipy.sparse import csr_array

Floats = npt.NDArray[np.float64]
Terms = dict[int, float]
"""A linear expression: the coefficient of each variable."""


@dataclass(frozen=True)
class Event:
    """An op of forward or an unpack of backward."""

    phase: str
    """"forward" or "unpack"."""
    index: int


class Rows:
    """Constraints `low ≤ Σ coefficient · variable ≤ high`. Equal rows are stored once."""

    def __init__(self, n_variables: int) -> None:
        self.n_variables = n_variables
        self._seen: set[tuple[tuple[tuple[int, float], ...], float, float]] = set()
        self._columns: list[int] = []
        self._coefficients: list[float] = []
        self._starts = [0]
        self._low: list[float] = []
        self._high: list[float] = []

    def new_variable(self) -> int:
        """Return the number of an additional variable."""
        self.n_variables += 1
        return self.n_variables - 1

    def add(self, terms: Terms, low: float, high: float) -> None:
        """Add one row, unless an equal row exists."""
        key = (tuple(sorted(terms.items())), low, high)
        if key in self._seen:
            return
        self._seen.add(key)
        self._columns.extend(terms)
        self._coefficients.extend(terms.values())
        self._starts.append(len(self._columns))
        self._low.append(low)
        self._high.append(high)

    def constraint(self) -> LinearConstraint:
        """Return all rows for the solver."""
        shape = (len(self._starts) - 1, self.n_variables)
        matrix = csr_array((self._coefficients, self._columns, self._starts), shape=shape, dtype=float)
        return LinearConstraint(matrix, self._low, self._high)


def sum_terms(terms: Iterable[tuple[int, float]]) -> Terms:
    """Return the sum of (variable, coefficient) pairs, without variables whose coefficients cancel."""
    total: Terms = {}
    for variable, coefficient in terms:
        total[variable] = total.get(variable, 0.0) + coefficient
    return {variable: coefficient for variable, coefficient in total.items() if coefficient}
