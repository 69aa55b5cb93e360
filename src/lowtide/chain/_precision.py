"""Narrow storage of floating-point arrays: float16, bfloat16, and int8 by block.

Compressed arrays stay on the device of the original. Decompressed arrays have the original dtype, shape and
memory order. NaN and infinities are preserved, and finite values stay finite. Arrays of other dtypes, and
arrays that would not become smaller, are stored exactly. Compression needs a few MiB beside its result.
int8 needs the size of the result once more, and JAX a few copies of the array.

M is the largest finite magnitude in the array, for int8 in the block of 64 values. For results that are
normal numbers of the dtype, the error of a value x is at most

| precision  | error                          | bytes per value                                           |
|------------|--------------------------------|-----------------------------------------------------------|
| `float16`  | max(2⁻¹¹ · abs(x), 2⁻³⁹ · M)   | 2; exact for values that float16 can represent            |
| `bfloat16` | max(2⁻⁸ · abs(x), 2⁻⁶⁶ · M)    | 2; exact for bfloat16 values if M is in 2⁻⁶⁰…2¹²⁷         |
| `int8`     | M / 253                        | 1 + 4/64 (float64: 8/64); 8 + itemsize more per NaN or ∞  |

float16 has a small exponent range, so every array is first scaled by the power of two that brings M just
below the largest float16. bfloat16 arrays are scaled only if M is out of range. Powers of two are exact.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import ArgumentError
from ._arrays import ArrayLayout, array_bytes, cast, dtype_name, from_flat, library, namespace, to_flat

PRECISIONS = ("exact", "float16", "bfloat16", "int8")
BLOCK_VALUES = 64
_CHUNK_VALUES = 4096 * BLOCK_VALUES
_REAL_DTYPES = {"float32": "float32", "float64": "float64", "complex64": "float32", "complex128": "float64"}
_HALF_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Compressed:
    """One array in narrow precision. `parts` are arrays of the same library."""

    precision: str
    parts: tuple[Any, ...]
    layout: ArrayLayout
    exponent: int
    """The values were divided by 2 to this power."""
    real: str
    """The real dtype of the values before compression."""


def check_precision(precision: str) -> str:
    """Return `precision`. Raise `ArgumentError` if the name is unknown."""
    if precision not in PRECISIONS:
        raise ArgumentError(f"precision is one of {', '.join(map(repr, PRECISIONS))}, not {precision!r}")
    return precision


def compress(leaf: Any, precision: str) -> Compressed | None:
    """Return `leaf` in `precision`, or None if the array must be stored exactly or would not become smaller."""
    name = dtype_name(leaf)
    real = _REAL_DTYPES.get(name) or ("float32" if precision == "int8" and name in _HALF_DTYPES else None)
    if precision == "exact" or real is None or not leaf.shape or 0 in leaf.shape:
        return None
    flat, layout = to_flat(leaf)
    flat = _as_real(flat) if name.startswith("complex") else flat
    if precision == "int8":
        parts, exponent = _compress_int8(flat, real), 0
    else:
        largest = _largest(flat)
        exponent = _exponent(largest, precision)
        cap = _cap(largest, exponent, precision, real)
        parts = (_compress_half(flat, precision, exponent, cap),)
    if sum(array_bytes(part) for part in parts) >= array_bytes(leaf):
        return None
    return Compressed(precision, parts, layout, exponent, real)


def decompress(compressed: Compressed) -> Any:
    """Return the array in its original dtype."""
    name = str(compressed.layout.dtype).removeprefix("torch.")
    if compressed.precision == "int8":
        flat = _decompress_int8(compressed.parts, compressed.real)
    else:
        flat = _decompress_half(compressed.parts[0], compressed.real, compressed.exponent)
    if name.startswith("complex"):
        flat = _as_complex(flat, name)
    elif name != compressed.real:
        flat = cast(flat, name)
    return from_flat(flat, compressed.layout)


def _chunks(flat: Any) -> Iterator[slice]:
    # JAX arrays cannot be written in parts, so the only chunk is the whole array.
    length = len(flat) if library(flat) == "jax" else _CHUNK_VALUES
    for start in range(0, len(flat), length):
        yield slice(start, min(start + length, len(flat)))


def _largest(flat: Any) -> float:
    """Return the largest finite magnitude."""
    xp = namespace(library(flat) or "numpy")
    largest = 0.0
    for chunk in _chunks(flat):
        sizes = xp.abs(flat[chunk])
        top = float(sizes.max())
        if not math.isfinite(top):
            top = float(xp.where(xp.isfinite(sizes), sizes, 0).max())
        largest = max(largest, top)
    return largest


def _exponent(largest: float, precision: str) -> int:
    """Return the power of two to divide an array by, so that its largest value is in range."""
    fraction, exponent = math.frexp(largest)  # largest = fraction · 2^exponent, fraction in [½, 1)
    if precision == "bfloat16":
        return 0 if largest == 0 or 2.0**-60 <= largest <= 2.0**127 else exponent
    # 65520 and above round to infinity in float16.
    return 0 if largest == 0 else exponent - 16 + (fraction * 2**16 >= 65520)


def _cap(largest: float, exponent: int, precision: str, real: str) -> float | None:
    """Return the limit for scaled values that keeps them finite after scaling back, None if none is needed."""
    if exponent == 0 or math.frexp(largest)[1] < np.finfo(real).maxexp:
        return None
    if precision == "bfloat16":
        return 1 - 2.0**-8
    return 32752.0 if math.ldexp(largest, -exponent) < 2.0**15 else 65504.0


def _scaled(values: Any, exponent: int) -> Any:
    """Return values · 2^exponent. Two factors, because 2^exponent itself may not be representable."""
    if exponent == 0:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def _capped(values: Any, cap: float | None) -> Any:
    if cap is None:
        return values
    xp = namespace(library(values) or "numpy")
    return xp.where(xp.isfinite(values), xp.clip(values, -cap, cap), values)


def _compress_half(flat: Any, precision: str, exponent: int, cap: float | None) -> Any:
    lib = library(flat)
    with np.errstate(all="ignore"):
        if lib == "jax":
            return cast(_capped(_scaled(flat, -exponent), cap), precision)
        if lib == "torch":
            xp = namespace("torch")
            narrow = xp.empty(flat.shape, dtype=getattr(xp, precision), device=flat.device)
        else:
            narrow = np.empty(flat.shape, dtype=np.float16 if precision == "float16" else np.uint16)
        for chunk in _chunks(flat):
            values = _capped(_scaled(flat[chunk], -exponent), cap)
            if lib == "numpy" and precision == "bfloat16":
                values = _bfloat16_bits(values)
            narrow[chunk] = values
    return narrow


def _decompress_half(narrow: Any, real: str, exponent: int) -> Any:
    lib = library(narrow)
    if lib == "jax":
        return _scaled(cast(narrow, real), exponent)
    if lib == "torch":
        xp = namespace("torch")
        flat = xp.empty(narrow.shape, dtype=getattr(xp, real), device=narrow.device)
    else:
        flat = np.empty(narrow.shape, dtype=real)
    with np.errstate(all="ignore"):
        for chunk in _chunks(narrow):
            values = narrow[chunk]
            if lib == "numpy" and values.dtype == np.uint16:  # bfloat16 bits: NumPy has no such dtype
                values = (values.astype(np.uint32) << 16).view(np.float32)
            flat[chunk] = _scaled(cast(values, real), exponent)
    return flat


def _bfloat16_bits(values: Any) -> Any:
    """Return the upper halves of float32 values, rounded to nearest, ties to even."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040  # rounding could carry a NaN into infinity
    return np.where(np.isnan(single), quiet_nan, rounded).astype(np.uint16)


def _compress_int8(flat: Any, real: str) -> tuple[Any, ...]:
    """Return codes, one scale per block, and, if there are any, indices and values that are not finite."""
    xp = namespace(library(flat) or "numpy")
    codes, scales, indices, nonfinite = [], [], [], []
    for chunk in _chunks(flat):
        values = cast(flat[chunk], real)
        finite = xp.isfinite(values)
        if not bool(finite.all()):
            found = xp.nonzero(~finite)
            index = found[0] if isinstance(found, tuple) else found.reshape(-1)
            indices.append(cast(index, "int64") + chunk.start if library(flat) != "jax" else index)
            nonfinite.append(flat[chunk][index])
            values = xp.where(finite, values, xp.zeros_like(values))
        code, scale = _quantise(xp, values)
        codes.append(code)
        scales.append(scale)
    join = getattr(xp, "concatenate", None) or xp.cat
    rest = (join(indices), join(nonfinite)) if indices else ()
    return (join(codes), join(scales), *rest)


def _quantise(xp: Any, values: Any) -> tuple[Any, Any]:
    full_length = len(values) // BLOCK_VALUES * BLOCK_VALUES
    codes, scales = [], []
    for part in (values[:full_length].reshape(-1, BLOCK_VALUES), values[full_length:].reshape(1, -1)):
        if 0 in part.shape:
            continue
        # The scale is the largest magnitude M, not M / 127, which could be subnormal.
        scale = xp.abs(part).max(1) if library(part) != "torch" else xp.abs(part).amax(1)
        one = xp.ones_like(scale)
        divisor = xp.where(scale > 0, scale, one)
        # XLA divides by multiplying with the reciprocal, so the reciprocal must be a normal number.
        factor = xp.where(divisor > 2.0**100, one * 2.0**-64, xp.where(divisor < 2.0**-100, one * 2.0**64, one))
        ratios = part * factor[:, None] / (divisor * factor)[:, None]
        codes.append(cast(xp.round(ratios * 127), "int8").reshape(-1))
        scales.append(scale)
    join = getattr(xp, "concatenate", None) or xp.cat
    return join(codes), join(scales)


def _decompress_int8(parts: tuple[Any, ...], real: str) -> Any:
    codes, scales = parts[:2]
    flat = cast(codes, real) / 127
    full_length = len(flat) // BLOCK_VALUES * BLOCK_VALUES
    lib = library(flat)
    if lib == "jax":
        xp = namespace("jax")
        flat = flat * xp.repeat(scales, BLOCK_VALUES)[: len(flat)]
    else:
        body = flat[:full_length].reshape(-1, BLOCK_VALUES)
        body *= scales[: full_length // BLOCK_VALUES, None]
        if full_length < len(flat):
            flat[full_length:] *= scales[-1]
    if len(parts) == 4:
        indices, nonfinite = parts[2], cast(parts[3], real)
        if lib == "jax":
            return flat.at[indices].set(nonfinite)
        flat[indices] = nonfinite
    return flat


def _as_real(flat: Any) -> Any:
    """Return complex values as real values: real and imaginary parts alternate."""
    lib = library(flat)
    if lib == "numpy":
        return flat.view(flat.real.dtype)
    if lib == "torch":
        return namespace("torch").view_as_real(flat).reshape(-1)
    xp = namespace("jax")
    return xp.stack([flat.real, flat.imag], axis=-1).reshape(-1)


def _as_complex(flat: Any, name: str) -> Any:
    lib = library(flat)
    if lib == "numpy":
        return flat.view(name)
    pairs = flat.reshape(-1, 2)
    if lib == "torch":
        return namespace("torch").view_as_complex(pairs)
    return sys.modules["jax"].lax.complex(pairs[:, 0], pairs[:, 1])
