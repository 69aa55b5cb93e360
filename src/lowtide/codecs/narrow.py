"""Integers that need fewer bits than they have: token ids, positions, labels, indices of a pooling.

Exact. The distance from the middle of their range is kept, in 8, 16 or 32 bits. Unsigned integers are taken
as the signed ones with the same bits, so a range across the middle of an unsigned dtype is not seen as narrow.
"""

from __future__ import annotations

import torch

from ._base import Codec, Encoded, EncodedRow, Tensor, as_bits, chunks, extremes, sample

_WIDTHS = (torch.int8, torch.int16, torch.int32)
_WIDE = (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


class Narrow(Codec):
    """Integers of a small range: the range is kept, in fewer bytes."""

    name = "narrow"
    exact = True

    def accepts(self, dtype: torch.dtype) -> bool:
        """Integers of more than a byte."""
        return dtype in _WIDE

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        bits = as_bits(row)
        width = None
        for part in (sample(bits), bits):
            low, high = extremes(part)
            width = _width(high - low, bits.dtype.itemsize)
            if width is None:
                return None
        assert width is not None
        # The middle is itself in the range, so no difference can overflow.
        middle = (low + high + 1) // 2
        kept = torch.empty(len(bits), dtype=width, device=bits.device)
        for chunk in chunks(len(bits)):
            kept[chunk] = bits[chunk] - middle
        return EncodedRow((kept,), (middle,))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        (kept,) = encoded.parts
        (middle,) = encoded.scalars
        bits = as_bits(row)
        for chunk in chunks(len(bits)):
            bits[chunk].copy_(kept[chunk]).add_(middle)


def _width(distance: int, itemsize: int) -> torch.dtype | None:
    """The narrowest dtype for a range of this length, if it is narrower than `itemsize` bytes."""
    for dtype in _WIDTHS:
        if dtype.itemsize < itemsize and distance < 2 ** (8 * dtype.itemsize):
            return dtype
    return None
