"""Integers that need fewer bits than they have: token ids, positions, labels, indices of a pooling.

Exact. The distance from the middle of their range is kept, in 8, 16 or 32 bits. Unsigned integers are taken
as the signed ones with the same bits, so a range across the middle of an unsigned dtype is not seen as narrow.
"""

from __future__ import annotations

import torch

from ._contract import Codec, Encoded, Packed, Tensor, as_bits, extremes, pieces, sample

_WIDTHS = (torch.int8, torch.int16, torch.int32)
_WIDE = (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


class Narrow(Codec):
    """Integers of a small range: the range is kept, in fewer bytes."""

    name = "narrow"
    exact = True

    def accepts(self, dtype: torch.dtype) -> bool:
        """Integers of more than a byte."""
        return dtype in _WIDE

    def _pack(self, row: Tensor) -> Packed | None:
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
        for piece in pieces(len(bits)):
            kept[piece] = bits[piece] - middle
        return Packed((kept,), (middle,))

    def _unpack(self, encoded: Encoded, row: Tensor) -> None:
        (kept,) = encoded.parts
        (middle,) = encoded.scalars
        bits = as_bits(row)
        for piece in pieces(len(bits)):
            bits[piece].copy_(kept[piece]).add_(middle)


def _width(distance: int, itemsize: int) -> torch.dtype | None:
    """The narrowest dtype for a range of this length, if it is narrower than `itemsize` bytes."""
    for dtype in _WIDTHS:
        if dtype.itemsize < itemsize and distance < 2 ** (8 * dtype.itemsize):
            return dtype
    return None
