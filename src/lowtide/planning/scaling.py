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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ..records import Op, Trace, Unpack
from ..records.trace import Value
from .size_functions import STRIDES, Floats, NumberRange, SizeFunctions, product

_Record = TypeVar("_Record", bound=Op | Unpack | Value)


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
    fits = SizeFunctions(variables[:-1], variables[-1])
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


def _value_bytes(profiles: Sequence[SizedTrace], fits: SizeFunctions) -> NumberRange:
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
    found = NumberRange(np.ceil(np.maximum(upper, 0)), np.maximum(lower, 0))
    fits.round_monomials(nbytes, found)
    return found


def _dimensions(all_dims: Floats, fits: SizeFunctions) -> NumberRange:
    """Return the dimensions of values."""
    dims, place = np.unique(all_dims, axis=1, return_inverse=True)
    monomial, is_monomial = fits.monomial(dims)
    strided, is_strided = fits.strided(dims)
    varies = (dims != dims[0]).any(axis=0)
    is_strided &= varies
    is_open = varies & ~is_monomial & ~is_strided
    if is_open.any():  # only then may it be padded to a multiple: other forms are more common
        padded, is_strided[is_open] = fits.strided(dims[:, is_open], STRIDES[1:])
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
    return NumberRange(highest[place], lowest[place])


# -- traces from rows of numbers ------------------------------------------------------------------------


def _times(profiles: Sequence[SizedTrace], value_bytes: NumberRange) -> Floats:
    """Return the times of the events and their replays, which grow with the bytes of all values. 0: no replay time."""
    rows = np.array([p.numbers.times for p in profiles])
    totals = np.array([p.numbers.value_bytes.sum() for p in profiles])
    deviation = totals - totals.mean()
    variance = float((deviation**2).sum())
    slope = product(deviation, rows) / variance if variance else np.zeros(rows.shape[1])
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
