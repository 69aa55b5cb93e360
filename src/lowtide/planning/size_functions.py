"""Functions of the sizes of a step that agree with all profiles.

Numbers come as arrays with a row per profile and a column per number. Several functions may agree with a column: the
result has the largest and the smallest value for the wanted sizes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

STRIDES = (1, 2, 4, 8, 16, 32, 64)
"""Total strides of convolutions and pooling. Doubled: deeper pyramids of images are exact."""
_MAX_DEGREE = 3
"""Degree of monomials in two or three variables. Doubled: slower, and more functions agree with the profiles."""
_MAX_DEGREE_OTHERS = 2
"""The same in one variable, and in more than three."""
_EXACT = 1e-9
"""Share of a number by which an exact function may differ from it: floating point is not exact."""
_MAX_TERMS = 3
"""Monomials in a sum. Doubled: slower, and hardly any other bytes need more."""
_MAX_CHOICES = 50
"""Sums tried of each number of monomials. Doubled: slower, and exact with more sizes that vary on their own."""


@dataclass(frozen=True)
class NumberRange:
    """The largest and smallest result of the functions that agree with all profiles."""

    upper: Floats
    lower: Floats

    @property
    def spread(self) -> Floats:
        """The largest minus the smallest result."""
        return self.upper - self.lower


@functools.cache
def _exponents(n_variables: int) -> Floats:
    """Return the exponents of all monomials, one row each. The first one is the constant."""
    degree = _MAX_DEGREE if 1 < n_variables <= _MAX_DEGREE else _MAX_DEGREE_OTHERS
    factors = itertools.combinations_with_replacement(range(-1, n_variables), degree)  # -1 stands for a factor of 1
    return np.array([[chosen.count(v) for v in range(n_variables)] for chosen in factors], dtype=np.float64)


def product(left: Floats, right: Floats) -> Floats:
    """Return the matrix product without BLAS, whose threads would spin on other cores for 0.1 s after each call."""
    found: Floats = np.einsum("...i,ij->...j", left, right)
    return found


@dataclass(frozen=True)
class _Sums:
    """Functions of some columns: a constant plus multiples of the same monomials."""

    terms: tuple[int, ...]
    """The monomials, by index."""
    columns: npt.NDArray[np.intp]
    factors: Floats
    """By term and column, the constant first."""
    highest_error: Floats
    lowest_error: Floats


@functools.lru_cache(maxsize=32)  # the same for all sizes that were not profiled
def _fitted_sums(monomials: bytes, numbers: bytes, n_profiles: int) -> tuple[_Sums, ...]:
    """Fit the columns of `numbers` that are not constant. Both arrays have a row per profile.

    The fewest monomials that agree with all profiles count, and all such sums. Where no sum agrees, the result has all
    single monomials, with their errors.
    """
    at_profiles = np.frombuffer(monomials).reshape(n_profiles, -1)
    rows = np.frombuffer(numbers).reshape(n_profiles, -1)
    n_monomials = at_profiles.shape[1]
    columns = np.flatnonzero((rows != rows[0]).any(axis=0))
    found: list[_Sums] = []
    inexact: list[_Sums] = []
    for n_terms in range(1, _MAX_TERMS + 1):
        n_needed = n_terms + (1 if n_terms == n_monomials else 2)  # one more than unknowns shows which sums agree
        if n_terms > 1 and (n_needed > n_profiles or math.comb(n_monomials, n_terms) > _MAX_CHOICES):
            break
        is_fitted = np.zeros(len(columns), dtype=np.bool_)
        for terms in itertools.combinations(range(n_monomials), n_terms) if len(columns) else ():
            matrix = np.column_stack([np.ones(n_profiles), at_profiles[:, terms]])
            scales = np.abs(matrix).max(axis=0)
            if np.linalg.matrix_rank(matrix / scales) < len(scales):
                continue
            factors = product(np.linalg.pinv(matrix / scales), rows[:, columns]) / scales[:, None]
            error = rows[:, columns] - product(matrix, factors)
            agrees = (np.abs(error) <= _EXACT * np.abs(rows[:, columns]).max(axis=0)).all(axis=0)
            is_fitted |= agrees
            nothing = np.zeros(int(agrees.sum()))
            found.append(_Sums(terms, columns[agrees], factors[:, agrees], nothing, nothing))
            if n_terms == 1:
                inexact.append(_Sums(terms, columns, factors, error.max(axis=0), error.min(axis=0)))
        columns = columns[~is_fitted]
    for sums in inexact:
        is_open = np.isin(sums.columns, columns)
        found.append(
            _Sums(
                sums.terms,
                sums.columns[is_open],
                sums.factors[:, is_open],
                sums.highest_error[is_open],
                sums.lowest_error[is_open],
            )
        )
    return tuple(sums for sums in found if len(sums.columns))


class SizeFunctions:
    """Functions that agree with the profiles, evaluated for the wanted sizes."""

    def __init__(self, variables: Floats, wanted: Floats) -> None:
        """`variables` has a row per profile."""
        self._variables = variables
        self._wanted = wanted
        exponents = _exponents(len(wanted))
        at_profiles = np.prod(variables[None] ** exponents[:, None], axis=2)
        at_wanted = np.prod(wanted**exponents, axis=1)
        self._monomials = [(row, float(number)) for row, number in zip(at_profiles, at_wanted, strict=True)]
        self._used: set[int] = set()
        """The monomials that values have, by index. 0 is the constant."""
        self._rounded: dict[int, tuple[float, float]] = {}
        """By used monomial: the largest and smallest result for the wanted sizes, with dimensions rounded."""

    def monomial(self, rows: Floats) -> tuple[NumberRange, npt.NDArray[np.bool_]]:
        """Fit `c · monomial` to each column. Return the results, and which columns have any."""
        upper = np.full(rows.shape[1], -np.inf)
        lower = np.full(rows.shape[1], np.inf)
        for index, (_, at_wanted) in enumerate(self._monomials):
            factor, agrees = self._agreeing(index, rows)
            if index and (rows[-1][agrees] > 0).any():
                self._used.add(index)
            found = factor * at_wanted
            upper[agrees] = np.maximum(upper[agrees], found[agrees])
            lower[agrees] = np.minimum(lower[agrees], found[agrees])
        return NumberRange(upper, lower), np.isfinite(upper)

    def _agreeing(self, index: int, rows: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the factor of a monomial for each column, and which columns are this monomial."""
        at_profiles = self._monomials[index][0]
        factor: Floats = rows[-1] / at_profiles[-1]
        return factor, (np.abs(at_profiles[:, None] * factor - rows) <= _EXACT * np.abs(rows)).all(axis=0)

    def round_monomials(self, values: Floats, found: NumberRange) -> None:
        """Let other bytes grow as the values with the same monomial, whose dimensions may be rounded."""
        for index in self._used:
            factor, agrees = self._agreeing(index, values)
            agrees &= factor > 0
            at_wanted = self._monomials[index][1]
            largest = (found.upper[agrees] / factor[agrees]).max(initial=at_wanted)
            smallest = (found.lower[agrees] / factor[agrees]).min(initial=at_wanted)
            self._rounded[index] = float(largest), float(smallest)

    def with_constant(self, rows: Floats) -> NumberRange:
        """Fit a constant plus multiples of monomials to each column. The results lie above all profiles."""
        used = sorted(self._used) or list(range(1, len(self._monomials)))
        at_profiles = np.column_stack([self._monomials[index][0] for index in used])
        limits = np.full((2, rows.shape[1]), [[-np.inf], [np.inf]])
        for found in _fitted_sums(at_profiles.tobytes(), rows.tobytes(), len(rows)):
            rounded = [self._rounded.get(used[i], (self._monomials[used[i]][1],) * 2) for i in found.terms]
            largest, smallest = np.array([(1.0, 1.0), *rounded]).T
            rising, falling = np.maximum(found.factors, 0), np.minimum(found.factors, 0)
            upper = product(largest, rising) + product(smallest, falling) + found.highest_error
            lower = product(smallest, rising) + product(largest, falling) + found.lowest_error
            limits[0, found.columns] = np.maximum(limits[0, found.columns], upper)
            limits[1, found.columns] = np.minimum(limits[1, found.columns], lower)
        is_open = ~np.isfinite(limits[0])
        return NumberRange(
            np.where(is_open, rows.max(axis=0), limits[0]), np.where(is_open, rows.min(axis=0), limits[1])
        )

    def strided(self, rows: Floats, factors: Sequence[int] = (1,)) -> tuple[NumberRange, npt.NDArray[np.bool_]]:
        """Fit `factor * floor((variable + offset) / (factor * stride))` to each column.

        Return the results, and which columns have any.
        """
        upper = np.full(rows.shape[1], -np.inf)
        lower = np.full(rows.shape[1], np.inf)
        varies = (self._variables != self._variables[0]).any(axis=0)
        variables, wanted = self._variables.T[varies, :, None], self._wanted[varies, None]
        for factor, padded in ((f, p) for f in factors for p in STRIDES if p >= f):
            is_multiple = (rows % factor == 0).all(axis=0)
            if not is_multiple.any():
                continue
            needed = padded // factor * rows - variables
            least = needed.max(axis=1)
            most = needed.min(axis=1) + padded - 1
            agrees = (least <= most) & is_multiple
            largest = factor * np.floor((wanted + most) / padded)
            smallest = factor * np.floor((wanted + least) / padded)
            upper = np.maximum(upper, np.where(agrees, largest, -np.inf).max(axis=0, initial=-np.inf))
            lower = np.minimum(lower, np.where(agrees, smallest, np.inf).min(axis=0, initial=np.inf))
        return NumberRange(upper, lower), np.isfinite(upper)
