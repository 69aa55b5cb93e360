"""Traces for sizes that were not profiled, from profiles of the same step with other sizes.

The *sizes* of a step are the dimensions of its inputs. Sizes that are equal in all profiles and in the wanted step
count as one variable. Each number of a trace is then a function of the variables:

- A dimension of a value is a monomial `c · x^i · y^j`, such as batch times length, or a variable divided by a stride
  and rounded, as in convolutions, perhaps after padding to a multiple.
- Bytes of values without a shape are monomials.
- Other bytes, and what does not fit one of these forms, are a constant plus multiples of the monomials that values
  have, of as few of them as possible.

Several functions may agree with all profiles. The largest one gives the trace, so that a plan for it fits, and the
distance to the smallest one is the uncertainty. One more profile then tells which function is right.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..records import Op, Trace, Unpack
from ..records.trace import Value

Floats = npt.NDArray[np.float64]
_Record = TypeVar("_Record", bound=Op | Unpack | Value)

_STRIDES = (1, 2, 4, 8, 16, 32, 64)
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
class SizedTrace:
    """A profiled step and its sizes."""

    sizes: tuple[int, ...]
    trace: Trace
    bytes_before: int
    """Bytes alive before the step, which all other bytes include."""

    @cached_property
    def numbers(self) -> _Numbers:
        """The numbers of the trace that depend on the sizes."""
        events, copies = self.trace.events, self.trace.copies
        return _Numbers(
            value_bytes=_floats(value.nbytes for value in self.trace.values),
            alive=_floats(event.other_bytes - self.bytes_before for event in events),
            parts=_floats(
                [
                    *(event.workspace_bytes if isinstance(event, Op) else event.rise_bytes for event in events),
                    *(nbytes for effect in copies for nbytes in (effect.more_bytes, effect.more_rise_bytes)),
                ]
            ),
            times=_floats(
                [
                    *(event.time_s for event in events),
                    *((event.replay_s or 0.0) if isinstance(event, Op) else 0.0 for event in events),
                    self.trace.step_s,
                    self.trace.copying_s,
                ]
            ),
        )


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a trace as rows."""

    value_bytes: Floats
    alive: Floats
    """Other bytes by event, above the bytes alive before the step."""
    parts: Floats
    """By event: the workspace of an op or the rise of an unpack. Then both numbers of each gradient copy."""
    times: Floats
    """By event, then their replays (0: none), then of the step and of all gradient copies."""


def _floats(numbers: Iterable[float]) -> Floats:
    return np.array(list(numbers), dtype=np.float64)


@dataclass(frozen=True)
class ScaledTrace:
    """A step that was not profiled."""

    trace: Trace
    uncertain_bytes: int
    """Upper limit on the bytes by which the peak may be smaller than in `trace`."""


def scale(profiles: Sequence[SizedTrace], sizes: tuple[int, ...], bytes_before: int) -> ScaledTrace:
    """Return the step with these sizes. All `profiles` must have the same structure."""
    known = next((p for p in profiles if p.sizes == sizes), None)
    if known is not None:
        return ScaledTrace(_shifted(known.trace, bytes_before - known.bytes_before), 0)
    variables = _variables([*(p.sizes for p in profiles), sizes])
    fits = _Fits(variables[:-1], variables[-1])
    value_bytes = _value_bytes(profiles, fits)
    other_bytes = fits.with_constant(np.array([p.numbers.alive for p in profiles]))
    parts = fits.with_constant(np.array([p.numbers.parts for p in profiles]))
    times = _times(profiles, value_bytes)
    trace = _assembled(profiles[-1].trace, value_bytes.upper, other_bytes.upper + bytes_before, parts.upper, times)
    saved = np.array(trace.saved, dtype=np.intp)
    uncertain = float(value_bytes.spread[saved].sum()) + float(other_bytes.spread.max(initial=0.0))
    return ScaledTrace(trace, int(uncertain))


def _shifted(trace: Trace, nbytes: int) -> Trace:
    events = tuple(replace(event, other_bytes=max(0, event.other_bytes + nbytes)) for event in trace.events)
    return replace(trace, events=events, peak_bytes=max(0, trace.peak_bytes + nbytes))


def _variables(rows: Sequence[Sequence[int]]) -> Floats:
    """Return the distinct columns of `rows` that are not constant. There is at least one."""
    columns = dict.fromkeys(zip(*rows, strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    return np.array(varying or [(1,) * len(rows)], dtype=np.float64).T


# -- functions of the sizes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Range:
    """The largest and smallest result of the functions that agree with all profiles."""

    upper: Floats
    lower: Floats

    @property
    def spread(self) -> Floats:
        return self.upper - self.lower


@functools.cache
def _exponents(n_variables: int) -> Floats:
    """Return the exponents of all monomials, one row each. The first one is the constant."""
    degree = _MAX_DEGREE if 1 < n_variables <= _MAX_DEGREE else _MAX_DEGREE_OTHERS
    factors = itertools.combinations_with_replacement(range(-1, n_variables), degree)  # -1 stands for a factor of 1
    return np.array([[chosen.count(v) for v in range(n_variables)] for chosen in factors], dtype=np.float64)


def _product(left: Floats, right: Floats) -> Floats:
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
            factors = _product(np.linalg.pinv(matrix / scales), rows[:, columns]) / scales[:, None]
            error = rows[:, columns] - _product(matrix, factors)
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


class _Fits:
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

    def monomial(self, rows: Floats) -> tuple[_Range, npt.NDArray[np.bool_]]:
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
        return _Range(upper, lower), np.isfinite(upper)

    def _agreeing(self, index: int, rows: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return the factor of a monomial for each column, and which columns are this monomial."""
        at_profiles = self._monomials[index][0]
        factor: Floats = rows[-1] / at_profiles[-1]
        return factor, (np.abs(at_profiles[:, None] * factor - rows) <= _EXACT * np.abs(rows)).all(axis=0)

    def round_monomials(self, values: Floats, found: _Range) -> None:
        """Let other bytes grow as the values with the same monomial, whose dimensions may be rounded."""
        for index in self._used:
            factor, agrees = self._agreeing(index, values)
            agrees &= factor > 0
            at_wanted = self._monomials[index][1]
            largest = (found.upper[agrees] / factor[agrees]).max(initial=at_wanted)
            smallest = (found.lower[agrees] / factor[agrees]).min(initial=at_wanted)
            self._rounded[index] = float(largest), float(smallest)

    def with_constant(self, rows: Floats) -> _Range:
        """Fit a constant plus multiples of monomials to each column. The results lie above all profiles."""
        used = sorted(self._used) or list(range(1, len(self._monomials)))
        at_profiles = np.column_stack([self._monomials[index][0] for index in used])
        limits = np.full((2, rows.shape[1]), [[-np.inf], [np.inf]])
        for found in _fitted_sums(at_profiles.tobytes(), rows.tobytes(), len(rows)):
            rounded = [self._rounded.get(used[i], (self._monomials[used[i]][1],) * 2) for i in found.terms]
            largest, smallest = np.array([(1.0, 1.0), *rounded]).T
            rising, falling = np.maximum(found.factors, 0), np.minimum(found.factors, 0)
            upper = _product(largest, rising) + _product(smallest, falling) + found.highest_error
            lower = _product(smallest, rising) + _product(largest, falling) + found.lowest_error
            limits[0, found.columns] = np.maximum(limits[0, found.columns], upper)
            limits[1, found.columns] = np.minimum(limits[1, found.columns], lower)
        is_open = ~np.isfinite(limits[0])
        return _Range(np.where(is_open, rows.max(axis=0), limits[0]), np.where(is_open, rows.min(axis=0), limits[1]))

    def strided(self, rows: Floats, factors: Sequence[int] = (1,)) -> tuple[_Range, npt.NDArray[np.bool_]]:
        """Fit `factor * floor((variable + offset) / (factor * stride))` to each column.

        Return the results, and which columns have any.
        """
        upper = np.full(rows.shape[1], -np.inf)
        lower = np.full(rows.shape[1], np.inf)
        varies = (self._variables != self._variables[0]).any(axis=0)
        variables, wanted = self._variables.T[varies, :, None], self._wanted[varies, None]
        for factor, padded in ((f, p) for f in factors for p in _STRIDES if p >= f):
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
        return _Range(upper, lower), np.isfinite(upper)


def _value_bytes(profiles: Sequence[SizedTrace], fits: _Fits) -> _Range:
    """Return the bytes of the values, from their shapes if these are known."""
    traces = [p.trace for p in profiles]
    latest = traces[-1].values
    nbytes = np.array([p.numbers.value_bytes for p in profiles])
    result, is_monomial = fits.monomial(nbytes)
    fallback = fits.with_constant(nbytes)
    upper = np.where(is_monomial, result.upper, fallback.upper)
    lower = np.where(is_monomial, result.lower, fallback.lower)
    grows = (nbytes != nbytes[0]).any(axis=0)
    shaped = [
        v
        for v in np.flatnonzero(grows)
        if latest[v].shape and all(len(trace.values[v].shape or ()) == len(latest[v].shape or ()) for trace in traces)
    ]
    if shaped:
        ranks = [len(latest[v].shape or ()) for v in shaped]
        starts = np.cumsum([0, *ranks[:-1]])
        dims = np.array(
            [[d for v in shaped for d in trace.values[v].shape or ()] for trace in traces], dtype=np.float64
        )
        sized = _dimensions(dims, fits)
        item_bytes = nbytes[-1, shaped] / np.maximum(1.0, np.multiply.reduceat(dims[-1], starts))
        sized_upper = item_bytes * np.multiply.reduceat(sized.upper, starts)
        sized_lower = item_bytes * np.multiply.reduceat(sized.lower, starts)
        both = is_monomial[shaped]
        upper[shaped] = np.where(both, np.maximum(upper[shaped], sized_upper), sized_upper)
        lower[shaped] = np.where(both, np.minimum(lower[shaped], sized_lower), sized_lower)
    found = _Range(np.ceil(np.maximum(upper, 0)), np.maximum(lower, 0))
    fits.round_monomials(nbytes, found)
    return found


def _dimensions(all_dims: Floats, fits: _Fits) -> _Range:
    """Return the dimensions of values."""
    dims, place = np.unique(all_dims, axis=1, return_inverse=True)
    monomial, is_monomial = fits.monomial(dims)
    strided, is_strided = fits.strided(dims)
    varies = (dims != dims[0]).any(axis=0)
    is_strided &= varies
    is_open = varies & ~is_monomial & ~is_strided
    if is_open.any():  # only then may it be padded to a multiple: other forms are more common
        padded, is_strided[is_open] = fits.strided(dims[:, is_open], _STRIDES[1:])
        strided.upper[is_open], strided.lower[is_open] = padded.upper, padded.lower
    other = fits.with_constant(dims)
    # Half of 32, 64 and 128 may be rounded up or down at other sizes: such a dimension has both forms.
    upper = np.maximum(np.where(is_monomial, np.ceil(monomial.upper), 0), np.where(is_strided, strided.upper, 0))
    lower = np.minimum(
        np.where(is_monomial, np.floor(monomial.lower), np.inf), np.where(is_strided, strided.lower, np.inf)
    )
    known = is_monomial | is_strided
    highest = np.where(known, upper, np.ceil(other.upper))
    lowest = np.where(known, lower, np.floor(other.lower))
    return _Range(highest[place], lowest[place])


# -- traces from rows of numbers ------------------------------------------------------------------------


def _times(profiles: Sequence[SizedTrace], value_bytes: _Range) -> Floats:
    """Return the times of the events and their replays, which grow with the bytes of all values. 0: no replay time."""
    rows = np.array([p.numbers.times for p in profiles])
    totals = np.array([p.numbers.value_bytes.sum() for p in profiles])
    deviation = totals - totals.mean()
    variance = float((deviation**2).sum())
    slope = _product(deviation, rows) / variance if variance else np.zeros(rows.shape[1])
    found: Floats = rows.mean(axis=0) + slope * (float(value_bytes.upper.sum()) - totals.mean())
    # Noise may give a line that falls below zero: times are at least in proportion to the smallest profile.
    smallest = int(totals.argmin())
    least: Floats = rows[smallest] * min(1.0, float(value_bytes.upper.sum()) / max(1.0, totals[smallest]))
    return np.maximum(found, least)


def _changed(record: _Record, changes: dict[str, Any]) -> _Record:
    """Return the same as `dataclasses.replace`, in a fifth of the time: a trace has hundreds of records."""
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__, **changes)
    return copy


def _assembled(trace: Trace, values: Floats, alive: Floats, parts: Floats, times: Floats) -> Trace:
    """Return a trace with the structure of `trace` and these numbers."""
    n_events = len(trace.events)
    sizes = [int(nbytes) for nbytes in values]
    other = [max(0, int(nbytes)) for nbytes in np.ceil(alive)]
    part = [int(nbytes) for nbytes in np.ceil(parts)]
    seconds = [float(t) for t in times]
    events: list[Op | Unpack] = []
    for t, event in enumerate(trace.events):
        changes: dict[str, Any] = {"other_bytes": other[t], "time_s": seconds[t]}
        if isinstance(event, Op):
            changes["workspace_bytes"] = max(0, part[t])
            changes["replay_s"] = None if event.replay_s is None else seconds[n_events + t]
        else:
            changes["rise_bytes"] = min(max(0, part[t]), other[t])
        events.append(_changed(event, changes))
    rise = [event.rise_bytes for event in events if isinstance(event, Unpack)]
    copies = tuple(
        replace(
            effect,
            more_bytes=part[n_events + 2 * k],
            more_rise_bytes=max(part[n_events + 2 * k + 1], -rise[effect.unpack]),
        )
        for k, effect in enumerate(trace.copies)
    )
    return replace(
        trace,
        events=tuple(events),
        values=tuple(
            _changed(value, {"nbytes": size, "shape": None}) for value, size in zip(trace.values, sizes, strict=True)
        ),
        step_s=max(seconds[-2], sum(seconds[:n_events])),
        copying_s=seconds[-1],
        copies=copies,
        peak_bytes=max(other, default=0) + sum(sizes),
    )
