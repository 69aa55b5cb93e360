"""Base class of bf16 and fp16: the tensor is scaled by one power of two and rounded to sixteen bits.

The scale brings the largest finite magnitude M into the range of the narrow dtype; scaling is exact.
Infinities stay, finite values stay finite, and NaN stays NaN but loses some payload bits.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from ._base import Codec, Encoded, EncodedRow, FixedSize, Tensor, chunks

_WIDE = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


class HalfPrecision(Codec):
    """Base class of codecs with sixteen bits per element."""

    exact = False
    narrow: ClassVar[torch.dtype]

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return whether `dtype` is float32, float64 or the complex dtype of one of these."""
        return dtype in _WIDE

    def fixed_size(self, dtype: torch.dtype, *, binary: bool = False, device: str = "cpu") -> FixedSize | None:
        """Return two bytes per element."""
        return FixedSize(bits=16) if dtype in (torch.float32, torch.float64) else None

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        values = row.view(_WIDE[row.dtype])
        largest = largest_finite(values)
        exponent = self.exponent(largest)
        narrowed = torch.empty(len(values), dtype=self.narrow, device=values.device)
        cap = self._cap(largest, exponent, values.dtype)
        if exponent == 0 and cap is None:
            narrowed.copy_(values)
            return EncodedRow((narrowed,), (exponent,))
        for chunk in chunks(len(values)):
            part = scaled(values[chunk], -exponent)
            if cap is not None:
                part = torch.where(part.isinf(), part, part.clamp(-cap, cap))
            narrowed[chunk] = part
        return EncodedRow((narrowed,), (exponent,))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        (narrowed,) = encoded.parts
        (exponent,) = encoded.scalars
        values = row.view(_WIDE[row.dtype])
        if exponent == 0:
            values.copy_(narrowed)
            return
        for chunk in chunks(len(values)):
            values[chunk] = scaled(narrowed[chunk].to(values.dtype), exponent)

    def exponent(self, largest: float) -> int:
        """Return e for M = `largest`: the values are divided by 2 to the power of e."""
        raise NotImplementedError

    def _cap(self, largest: float, exponent: int, dtype: torch.dtype) -> float | None:
        """Return the limit on scaled magnitudes, or None if rounding up cannot make a finite value infinite."""
        if math.frexp(largest)[1] < math.frexp(torch.finfo(dtype).max)[1]:
            return None
        # M is in the last binade. The limit is the largest narrow number below the next power of two.
        _, above = math.frexp(math.ldexp(largest, -exponent))
        return math.ldexp(1 - torch.finfo(self.narrow).eps / 2, above)


def largest_finite(values: Tensor) -> float:
    """Return the largest finite magnitude, or 0 if no value is finite."""
    least, most = torch.aminmax(values)
    largest = max(-float(least), float(most))
    if math.isfinite(largest):  # not finite if there is a NaN: aminmax propagates NaN
        return largest
    largest = 0.0
    for chunk in chunks(len(values)):
        part = values[chunk].abs()
        largest = max(largest, float(torch.where(part.isfinite(), part, 0).max()))
    return largest


def scaled(values: Tensor, exponent: int) -> Tensor:
    """Return values · 2^exponent. Two factors are used because a single one may be out of range."""
    if exponent == 0:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)
