"""narrow: integers with a small range, such as token ids, positions, labels and pooling indices.

Exact. The distance from the middle of the range is stored in 8, 16 or 32 bits. Unsigned integers are read as
signed integers with the same bits, so a range that crosses the middle of an unsigned dtype is not compressed.
"""

from __future__ import annotations

import torch

from ._base import Codec, Encoded, EncodedRow, Tensor, as_bits, chunks, extremes, sample

_WIDTHS = (torch.int8, torch.int16, torch.int32)
_WIDE = (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


class Narrow(Codec):
    """Stores integers with a small range in a narrower dtype."""

    name = "narrow"
    exact = True

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return whether `dtype` is an integer dtype wider than one byte."""
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
        # The middle is inside the range, so the differences do not overflow.
        middle = (low + high + 1) // 2
        offsets = torch.empty(len(bits), dtype=width, device=bits.device)
        for chunk in chunks(len(bits)):
            offsets[chunk] = bits[chunk] - middle
        return EncodedRow((offsets,), (middle,))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        (offsets,) = encoded.parts
        (middle,) = encoded.scalars
        bits = as_bits(row)
        for chunk in chunks(len(bits)):
            bits[chunk].copy_(offsets[chunk]).add_(middle)


def _width(distance: int, itemsize: int) -> torch.dtype | None:
    """Return the narrowest dtype for a range of length `distance`, or None if it needs `itemsize` bytes."""
    for dtype in _WIDTHS:
        if dtype.itemsize < itemsize and distance < 2 ** (8 * dtype.itemsize):
            return dtype
    return None
