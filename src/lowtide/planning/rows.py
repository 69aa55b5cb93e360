"""Sparse rows of a programme, and the places in a step for which there are rows of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Event:
    """Where a row of bytes is: at a forward op or at an ask."""

    phase: str
    index: int


class Rows:
    """Sparse rows `low <= Σ coefficient · variable <= high`, each written once."""

    def __init__(self) -> None:
        self._seen: set[tuple[tuple[tuple[int, float], ...], float, float]] = set()
        self._columns: list[int] = []
        self._coefficients: list[float] = []
        self._starts = [0]
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, terms: dict[int, float], low: float, high: float) -> None:
        """One row; a repeated one is left out."""
        key = (tuple(sorted(terms.items())), low, high)
        if key in self._seen:
            return
        self._seen.add(key)
        self._columns.extend(terms)
        self._coefficients.extend(terms.values())
        self._starts.append(len(self._columns))
        self.low.append(low)
        self.high.append(high)

    def matrix(self, n_columns: int) -> csr_array:
        """The coefficients."""
        return csr_array(
            (self._coefficients, self._columns, self._starts), shape=(len(self._starts) - 1, n_columns), dtype=float
        )
