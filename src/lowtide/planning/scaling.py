"""Traces for sizes that were not profiled, from profiles of the same step with other sizes.

The *sizes* of a step are the dimensions of its inputs. Sizes that are equal in all profiles and in the wanted step
count as one variable. Each number of a trace is then a function of the variables:

- A dimension of a value is a monomial `c · x^i · y^j`, such as batch times length, or a variable divided by a stride
  and rounded, as in convolutions.
- Bytes of values without a shape are monomials.
- Other bytes, and what does not fit one of these forms, are a constant plus multiples of the monomials that values
  have. With few profiles, only one of these monomials at a time.

Several functions may agree with all profiles. The largest one gives the trace, so that a plan for it fits, and the
distance to the smallest one is the uncertainty. One more profile then tells which function is right.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..records import Op, Trace, Unpack

Floats = npt.NDArray[np.float64]

_STRIDES = (1, 2, 4, 8, 16, 32, 64)
"""Total strides of convolutions and pooling. Doubled: deeper pyramids of images are exact."""
_MAX_DEGREE = 3
"""Degree of monomials in two or three variables. Doubled: slower, and more functions agree with the profiles."""
_MAX_DEGREE_OTHERS = 2
"""The same in one variable, and in more than three."""
_EXACT = 0.5
"""Bytes, or elements of a dimension, by which an exact function may differ from a profile."""


@dataclass(frozen=True)
class SizedTrace:
    """A profiled step and its sizes."""

    sizes: tuple[int, ...]
    trace: Trace
    bytes_before: int
    """Bytes alive before the step, which all other bytes include."""


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
    value_bytes = _value_bytes([p.trace for p in profiles], fits)
    others = [_other_bytes(p) for p in profiles]
    other_bytes = fits.with_constant(np.array([row.alive for row in others], dtype=np.float64))
    parts = fits.with_constant(np.array([row.parts for row in others], dtype=np.float64))
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


class _Fits:
    """Functions that agree with the profiles, evaluated for the wanted sizes."""

    def __init__(self, variables: Floats, wanted: Floats) -> None:
        """`variables` has a row per profile."""
        self._variables = variables
        self._wanted = wanted
        n_variables = len(wanted)
        degree = _MAX_DEGREE if 1 < n_variables <= _MAX_DEGREE else _MAX_DEGREE_OTHERS
        exponents = [e for e in itertools.product(range(degree + 1), repeat=n_variables) if sum(e) <= degree]
        self._monomials = [
            (np.prod(variables ** np.array(e), axis=1), float(np.prod(wanted ** np.array(e)))) for e in exponents
        ]
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
        return factor, (np.abs(at_profiles[:, None] * factor - rows) < _EXACT).all(axis=0)

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
        used = sorted(self._used) or range(1, len(self._monomials))
        enough = len(rows) > len(used)
        upper = np.full(rows.shape[1], -np.inf)
        lower = np.full(rows.shape[1], np.inf)
        for terms in [list(used)] if enough else [[index] for index in used]:
            at_profiles = np.column_stack([np.ones(len(rows)), *(self._monomials[index][0] for index in terms)])
            rounded = [self._rounded.get(index, (self._monomials[index][1],) * 2) for index in terms]
            largest, smallest = np.array([(1.0, 1.0), *rounded]).T
            scales = np.abs(at_profiles).max(axis=0)
            if np.linalg.matrix_rank(at_profiles / scales) < len(scales):
                continue
            factors, *_ = np.linalg.lstsq(at_profiles / scales, rows, rcond=None)
            error = rows - (at_profiles / scales) @ factors
            rising, falling = np.maximum(factors, 0), np.minimum(factors, 0)
            highest = (largest / scales) @ rising + (smallest / scales) @ falling
            lowest = (smallest / scales) @ rising + (largest / scales) @ falling
            upper = np.maximum(upper, highest + error.max(axis=0))
            lower = np.minimum(lower, lowest + error.min(axis=0))
        constant = (rows == rows[0]).all(axis=0) | ~np.isfinite(upper)
        highest, lowest = rows.max(axis=0), rows.min(axis=0)
        return _Range(np.where(constant, highest, upper), np.where(constant, lowest, lower))

    def strided(self, rows: Floats) -> tuple[_Range, npt.NDArray[np.bool_]]:
        """Fit `floor((variable + offset) / stride)` to each column. Return the results, and which columns have any."""
        upper = np.full(rows.shape[1], -np.inf)
        lower = np.full(rows.shape[1], np.inf)
        for variable, stride in itertools.product(range(len(self._wanted)), _STRIDES):
            x = self._variables[:, variable : variable + 1]
            if len(set(x[:, 0])) == 1:
                continue
            least = (stride * rows - x).max(axis=0)
            most = (stride * rows - x).min(axis=0) + stride - 1
            agrees = least <= most
            wanted = self._wanted[variable]
            upper[agrees] = np.maximum(upper[agrees], np.floor((wanted + most[agrees]) / stride))
            lower[agrees] = np.minimum(lower[agrees], np.floor((wanted + least[agrees]) / stride))
        return _Range(upper, lower), np.isfinite(upper)


def _value_bytes(traces: Sequence[Trace], fits: _Fits) -> _Range:
    """Return the bytes of the values, from their shapes if these are known."""
    latest = traces[-1].values
    nbytes = np.array([[value.nbytes for value in trace.values] for trace in traces], dtype=np.float64)
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
        owners = np.repeat(np.arange(len(shaped)), [len(latest[v].shape or ()) for v in shaped])
        dims = np.array(
            [[d for v in shaped for d in trace.values[v].shape or ()] for trace in traces], dtype=np.float64
        )
        sized = _dimensions(dims, fits)
        for i, v in enumerate(shaped):
            item_bytes = latest[v].nbytes / max(1.0, float(np.prod(latest[v].shape or ())))
            sized_upper = item_bytes * np.prod(sized.upper[owners == i])
            sized_lower = item_bytes * np.prod(sized.lower[owners == i])
            upper[v] = max(upper[v], sized_upper) if is_monomial[v] else sized_upper
            lower[v] = min(lower[v], sized_lower) if is_monomial[v] else sized_lower
    found = _Range(np.ceil(np.maximum(upper, 0)), np.maximum(lower, 0))
    fits.round_monomials(nbytes, found)
    return found


def _dimensions(dims: Floats, fits: _Fits) -> _Range:
    """Return the dimensions of values."""
    monomial, is_monomial = fits.monomial(dims)
    strided, is_strided = fits.strided(dims)
    other = fits.with_constant(dims)
    is_strided &= (dims != dims[0]).any(axis=0)
    # Half of 32, 64 and 128 may be rounded up or down at other sizes: such a dimension has both forms.
    upper = np.maximum(np.where(is_monomial, np.ceil(monomial.upper), 0), np.where(is_strided, strided.upper, 0))
    lower = np.minimum(
        np.where(is_monomial, np.floor(monomial.lower), np.inf), np.where(is_strided, strided.lower, np.inf)
    )
    known = is_monomial | is_strided
    return _Range(np.where(known, upper, np.ceil(other.upper)), np.where(known, lower, np.floor(other.lower)))


# -- traces as rows of numbers ------------------------------------------------------------------------


@dataclass(frozen=True)
class _OtherBytes:
    """The bytes of a trace that belong to no value."""

    alive: list[int]
    """By event, above the bytes alive before the step."""
    parts: list[int]
    """By event: the workspace of an op or the rise of an unpack. Then both numbers of each gradient copy."""


def _other_bytes(profile: SizedTrace) -> _OtherBytes:
    alive = [event.other_bytes - profile.bytes_before for event in profile.trace.events]
    parts = [e.workspace_bytes if isinstance(e, Op) else e.rise_bytes for e in profile.trace.events]
    for effect in profile.trace.copies:
        parts += effect.more_bytes, effect.more_rise_bytes
    return _OtherBytes(alive, parts)


def _times(profiles: Sequence[SizedTrace], value_bytes: _Range) -> Floats:
    """Return the times of the events and their replays, which grow with the bytes of all values. 0: no replay time."""
    rows = np.array([_time_row(p.trace) for p in profiles])
    totals = np.array([sum(value.nbytes for value in p.trace.values) for p in profiles], dtype=np.float64)
    deviation = totals - totals.mean()
    variance = float(deviation @ deviation)
    slope = deviation @ rows / variance if variance else np.zeros(rows.shape[1])
    found: Floats = rows.mean(axis=0) + slope * (float(value_bytes.upper.sum()) - totals.mean())
    # Noise may give a line that falls below zero: times are at least in proportion to the smallest profile.
    smallest = int(totals.argmin())
    least: Floats = rows[smallest] * min(1.0, float(value_bytes.upper.sum()) / max(1.0, totals[smallest]))
    return np.maximum(found, least)


def _time_row(trace: Trace) -> list[float]:
    times = [event.time_s for event in trace.events]
    replays = [(e.replay_s or 0.0) if isinstance(e, Op) else 0.0 for e in trace.events]
    return [*times, *replays, trace.step_s, trace.copying_s]


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
        events.append(replace(event, **changes))
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
        values=tuple(replace(value, nbytes=size, shape=None) for value, size in zip(trace.values, sizes, strict=True)),
        step_s=max(seconds[-2], sum(seconds[:n_events])),
        copying_s=seconds[-1],
        copies=copies,
        peak_bytes=max(other, default=0) + sum(sizes),
    )
