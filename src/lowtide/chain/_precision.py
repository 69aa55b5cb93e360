"""Narrow storage for floating-point arrays: float16, bfloat16, and int8 by block.

What is stored is really that narrow, on the device where the array was, and comes back in the dtype, shape
and memory order it had. NaN and infinities come back as they were, finite values stay finite, and integers,
bools and everything else that is not a float are kept exactly. An array that would not become smaller is
kept exactly too. Beside its result, packing takes a few MiB (int8: and the result again; JAX: a few copies).

With M the largest finite magnitude in the array (for int8: in the block of 64 values), and for results
that are normal numbers of the dtype, the error of one value x is at most

| precision  | error                          | bytes a value                                             |
|------------|--------------------------------|-----------------------------------------------------------|
| `float16`  | max(2⁻¹¹ · abs(x), 2⁻³⁹ · M)   | 2; what float16 can represent is exact                    |
| `bfloat16` | max(2⁻⁸ · abs(x), 2⁻⁶⁶ · M)    | 2; what bfloat16 can represent is exact (M in 2⁻⁶⁰…2¹²⁷)  |
| `int8`     | M / 253                        | 1 + 4/64 (float64: 8/64); 8 + itemsize more for a NaN or ∞ |

float16 has few exponents, so every array is first scaled by the power of two that puts M just below its
largest value; bfloat16 is scaled only where M is out of its range. Powers of two lose nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import ArgumentError
from ._arrays import Blueprint, array_bytes, cast, dtype_name, lay_out, library, namespace, stand_up

PRECISIONS = ("exact", "float16", "bfloat16", "int8")
BLOCK = 64
_CHUNK = 4096 * BLOCK
_REALS = {"float32": "float32", "float64": "float64", "complex64": "float32", "complex128": "float64"}
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Packed:
    """One array, stored narrow: `parts` are arrays of the same library."""

    precision: str
    parts: tuple[Any, ...]
    plan: Blueprint
    exponent: int
    """The values were divided by 2 to this power."""
    real: str
    """The dtype in which the values were computed with."""


def check_precision(precision: str) -> str:
    """`precision`, if it is one."""
    if precision not in PRECISIONS:
        raise ArgumentError(f"precision is one of {', '.join(map(repr, PRECISIONS))}, not {precision!r}")
    return precision


def pack(leaf: Any, precision: str) -> Packed | None:
    """`leaf` packed to `precision`; None when it has to be kept exactly or would not become smaller."""
    name = dtype_name(leaf)
    real = _REALS.get(name) or ("float32" if precision == "int8" and name in _HALVES else None)
    if precision == "exact" or real is None or not leaf.shape or 0 in leaf.shape:
        return None
    row, plan = lay_out(leaf)
    row = _as_real(row) if name.startswith("complex") else row
    if precision == "int8":
        parts, exponent = _pack_int8(row, real), 0
    else:
        largest = _largest(row)
        exponent = _exponent(largest, precision)
        cap = _cap(largest, exponent, precision, real)
        parts = (_pack_half(row, precision, exponent, cap),)
    if sum(array_bytes(part) for part in parts) >= array_bytes(leaf):
        return None
    return Packed(precision, parts, plan, exponent, real)


def unpack(packed: Packed) -> Any:
    """The array, in the dtype it had."""
    name = str(packed.plan.dtype).removeprefix("torch.")
    if packed.precision == "int8":
        row = _unpack_int8(packed.parts, packed.real)
    else:
        row = _unpack_half(packed.parts[0], packed.real, packed.exponent)
    if name.startswith("complex"):
        row = _as_complex(row, name)
    elif name != packed.real:
        row = cast(row, name)
    return stand_up(row, packed.plan)


def _chunks(row: Any) -> Iterator[slice]:
    # JAX arrays cannot be written piece by piece, so there the piece is the whole.
    length = len(row) if library(row) == "jax" else _CHUNK
    for start in range(0, len(row), length):
        yield slice(start, min(start + length, len(row)))


def _largest(row: Any) -> float:
    """The largest finite magnitude."""
    xp = namespace(library(row) or "numpy")
    largest = 0.0
    for piece in _chunks(row):
        sizes = xp.abs(row[piece])
        top = float(sizes.max())
        if not math.isfinite(top):
            top = float(xp.where(xp.isfinite(sizes), sizes, 0).max())
        largest = max(largest, top)
    return largest


def _exponent(largest: float, precision: str) -> int:
    """The power of two by which an array is divided, so that its largest value fits."""
    fraction, exponent = math.frexp(largest)  # largest = fraction · 2^exponent, fraction in [½, 1)
    if precision == "bfloat16":
        return 0 if largest == 0 or 2.0**-60 <= largest <= 2.0**127 else exponent
    # 65520 and above round to infinity in float16.
    return 0 if largest == 0 else exponent - 16 + (fraction * 2**16 >= 65520)


def _cap(largest: float, exponent: int, precision: str, real: str) -> float | None:
    """The most that a scaled value may be where rounding it up would overflow when it is scaled back."""
    if exponent == 0 or math.frexp(largest)[1] < np.finfo(real).maxexp:
        return None
    if precision == "bfloat16":
        return 1 - 2.0**-8
    return 32752.0 if math.ldexp(largest, -exponent) < 2.0**15 else 65504.0


def _scaled(values: Any, exponent: int) -> Any:
    """values · 2^exponent, in two factors because one may not be representable."""
    if exponent == 0:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def _capped(values: Any, cap: float | None) -> Any:
    if cap is None:
        return values
    xp = namespace(library(values) or "numpy")
    return xp.where(xp.isfinite(values), xp.clip(values, -cap, cap), values)


def _pack_half(row: Any, precision: str, exponent: int, cap: float | None) -> Any:
    kind = library(row)
    with np.errstate(all="ignore"):
        if kind == "jax":
            return cast(_capped(_scaled(row, -exponent), cap), precision)
        if kind == "torch":
            xp = namespace("torch")
            narrow = xp.empty(row.shape, dtype=getattr(xp, precision), device=row.device)
        else:
            narrow = np.empty(row.shape, dtype=np.float16 if precision == "float16" else np.uint16)
        for piece in _chunks(row):
            values = _capped(_scaled(row[piece], -exponent), cap)
            if kind == "numpy" and precision == "bfloat16":
                values = _bfloat16_bits(values)
            narrow[piece] = values
    return narrow


def _unpack_half(narrow: Any, real: str, exponent: int) -> Any:
    kind = library(narrow)
    if kind == "jax":
        return _scaled(cast(narrow, real), exponent)
    if kind == "torch":
        xp = namespace("torch")
        row = xp.empty(narrow.shape, dtype=getattr(xp, real), device=narrow.device)
    else:
        row = np.empty(narrow.shape, dtype=real)
    with np.errstate(all="ignore"):
        for piece in _chunks(narrow):
            values = narrow[piece]
            if kind == "numpy" and values.dtype == np.uint16:  # NumPy has no bfloat16 of its own
                values = (values.astype(np.uint32) << 16).view(np.float32)
            row[piece] = _scaled(cast(values, real), exponent)
    return row


def _bfloat16_bits(values: Any) -> Any:
    """The upper halves of float32 values, rounded to nearest, ties to even."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040  # rounding could carry a NaN into infinity
    return np.where(np.isnan(single), quiet_nan, rounded).astype(np.uint16)


def _pack_int8(row: Any, real: str) -> tuple[Any, ...]:
    """Codes, one scale for each block, and where there are any, places and values that are not finite."""
    xp = namespace(library(row) or "numpy")
    codes, scales, places, odd = [], [], [], []
    for piece in _chunks(row):
        values = cast(row[piece], real)
        finite = xp.isfinite(values)
        if not bool(finite.all()):
            where = xp.nonzero(~finite)
            at = where[0] if isinstance(where, tuple) else where.reshape(-1)
            places.append(cast(at, "int64") + piece.start if library(row) != "jax" else at)
            odd.append(row[piece][at])
            values = xp.where(finite, values, xp.zeros_like(values))
        code, scale = _quantise(xp, values)
        codes.append(code)
        scales.append(scale)
    join = getattr(xp, "concatenate", None) or xp.cat
    rest = (join(places), join(odd)) if places else ()
    return (join(codes), join(scales), *rest)


def _quantise(xp: Any, values: Any) -> tuple[Any, Any]:
    whole = len(values) // BLOCK * BLOCK
    codes, scales = [], []
    for part in (values[:whole].reshape(-1, BLOCK), values[whole:].reshape(1, -1)):
        if 0 in part.shape:
            continue
        # The scale is the largest magnitude and not its 127th, which might be too small for a normal number.
        scale = xp.abs(part).max(1) if library(part) != "torch" else xp.abs(part).amax(1)
        one = xp.ones_like(scale)
        divisor = xp.where(scale > 0, scale, one)
        # XLA divides by multiplying with the reciprocal, which must be a normal number too.
        factor = xp.where(divisor > 2.0**100, one * 2.0**-64, xp.where(divisor < 2.0**-100, one * 2.0**64, one))
        shares = part * factor[:, None] / (divisor * factor)[:, None]
        codes.append(cast(xp.round(shares * 127), "int8").reshape(-1))
        scales.append(scale)
    join = getattr(xp, "concatenate", None) or xp.cat
    return join(codes), join(scales)


def _unpack_int8(parts: tuple[Any, ...], real: str) -> Any:
    codes, scales = parts[:2]
    row = cast(codes, real) / 127
    whole = len(row) // BLOCK * BLOCK
    kind = library(row)
    if kind == "jax":
        xp = namespace("jax")
        row = row * xp.repeat(scales, BLOCK)[: len(row)]
    else:
        body = row[:whole].reshape(-1, BLOCK)
        body *= scales[: whole // BLOCK, None]
        if whole < len(row):
            row[whole:] *= scales[-1]
    if len(parts) == 4:
        places, odd = parts[2], cast(parts[3], real)
        if kind == "jax":
            return row.at[places].set(odd)
        row[places] = odd
    return row


def _as_real(row: Any) -> Any:
    """Complex values as twice as many real ones."""
    kind = library(row)
    if kind == "numpy":
        return row.view(row.real.dtype)
    if kind == "torch":
        return namespace("torch").view_as_real(row).reshape(-1)
    xp = namespace("jax")
    return xp.stack([row.real, row.imag], axis=-1).reshape(-1)


def _as_complex(row: Any, name: str) -> Any:
    kind = library(row)
    if kind == "numpy":
        return row.view(name)
    pairs = row.reshape(-1, 2)
    if kind == "torch":
        return namespace("torch").view_as_complex(pairs)
    return sys.modules["jax"].lax.complex(pairs[:, 0], pairs[:, 1])
