"""What bf16 and fp16 share: every value rounded to sixteen bits, the whole scaled by one power of two.

NaN stays NaN (some bits of its payload are lost), infinities stay, finite values stay finite. The power of two
brings the largest magnitude M into the range of the narrow dtype; scaling itself loses nothing.
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
    """Sixteen bits a value."""

    exact = False
    narrow: ClassVar[torch.dtype]

    def accepts(self, dtype: torch.dtype) -> bool:
        """float32 and float64, real or complex."""
        return dtype in _WIDE

    def fixed_size(self, dtype: torch.dtype, *, binary: bool = False) -> FixedSize | None:
        """Two bytes a value."""
        return FixedSize(bits=16) if dtype in (torch.float32, torch.float64) else None

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        values = row.view(_WIDE[row.dtype])
        largest = largest_finite(values)
        exponent = self.exponent(largest)
        kept = torch.empty(len(values), dtype=self.narrow, device=values.device)
        cap = self._cap(largest, exponent, values.dtype)
        if exponent == 0 and cap is None:
            kept.copy_(values)
            return EncodedRow((kept,), (exponent,))
        for chunk in chunks(len(values)):
            part = scaled(values[chunk], -exponent)
            if cap is not None:
                part = torch.where(part.isinf(), part, part.clamp(-cap, cap))
            kept[chunk] = part
        return EncodedRow((kept,), (exponent,))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        (kept,) = encoded.parts
        (exponent,) = encoded.scalars
        values = row.view(_WIDE[row.dtype])
        if exponent == 0:
            values.copy_(kept)
            return
        for chunk in chunks(len(values)):
            values[chunk] = scaled(kept[chunk].to(values.dtype), exponent)

    def exponent(self, largest: float) -> int:
        """The values are divided by 2 to this power when M is `largest`."""
        raise NotImplementedError

    def _cap(self, largest: float, exponent: int, dtype: torch.dtype) -> float | None:
        """What a scaled magnitude may be at most, where rounding up would make a finite value infinite."""
        if math.frexp(largest)[1] < math.frexp(torch.finfo(dtype).max)[1]:
            return None
        # M is in the last binade: the largest narrow number below the next power of two.
        _, above = math.frexp(math.ldexp(largest, -exponent))
        return math.ldexp(1 - torch.finfo(self.narrow).eps / 2, above)


def largest_finite(values: Tensor) -> float:
    """The largest finite magnitude, 0 where there is none."""
    least, most = torch.aminmax(values)
    largest = max(-float(least), float(most))
    if math.isfinite(largest):  # aminmax passes NaN on
        return largest
    largest = 0.0
    for chunk in chunks(len(values)):
        part = values[chunk].abs()
        largest = max(largest, float(torch.where(part.isfinite(), part, 0).max()))
    return largest


def scaled(values: Tensor, exponent: int) -> Tensor:
    """values · 2^exponent, in two factors, because one may be out of range."""
    if exponent == 0:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)
