"""Tensors with two different elements, one bit each: bool masks, and scaled dropout masks of any dtype.

Exact. The two may be any bit patterns. A bool takes an eighth of its memory, a float32 mask a 32nd.
"""

from __future__ import annotations

import numpy as np
import torch

from ._bitmap import pack_bits, packed_length, unpack_bits
from ._contract import Codec, Encoded, FixedSize, Packed, Tensor, as_bits, extremes, pieces

_FIRST = 2048


class Mask(Codec):
    """At most two different elements: a bit each."""

    name = "mask"
    exact = True

    def fixed_size(self, dtype: torch.dtype, *, binary: bool = False) -> FixedSize | None:
        """A bool is always one of two."""
        known = binary or dtype is torch.bool
        return FixedSize(bits=1, work_bytes=4 + 2 * dtype.itemsize) if known else None

    def _pack(self, row: Tensor) -> Packed | None:
        bits = as_bits(row)
        first = bits[:_FIRST]
        low, high = extremes(first)
        if not bool(((first == low) | (first == high)).all()):
            return None
        # What these have is mostly all there is: looking at everything would be one more pass over the memory.
        packed = _pack_two(bits, low, high)
        if packed is None and (all_of := extremes(bits)) != (low, high):
            packed = _pack_two(bits, *all_of)
        return packed

    def _unpack(self, encoded: Encoded, row: Tensor) -> None:
        (packed,) = encoded.parts
        low, difference = encoded.scalars
        bits = as_bits(row)
        for piece in pieces(len(bits)):
            part = bits[piece].copy_(unpack_bits(packed, piece))
            if (low, difference) != (0, 1):
                part.mul_(difference)
                if low:
                    part.bitwise_xor_(low)


def _pack_two(bits: Tensor, low: int, high: int) -> Packed | None:
    """A bit for each, which says whether it is the one or the other; None if any is neither."""
    packed = torch.empty(packed_length(len(bits)), dtype=torch.uint8, device=bits.device)
    for piece in pieces(len(bits)):
        flags = _which(bits[piece], low, high)
        if flags is None:
            return None
        packed[piece.start // 8 : packed_length(piece.stop)] = pack_bits(flags)
    return Packed((packed,), (low, low ^ high))


def _which(bits: Tensor, low: int, high: int) -> Tensor | None:
    """Which elements are not the lower one; None if any of those is not the higher one either."""
    if bits.device.type == "cpu":  # NumPy compares integers seven times as fast
        elements = bits.numpy()
        others = elements != low
        there = np.array_equal(others, elements == high) if high != low else not others.any()
        return torch.from_numpy(others) if there else None
    differ = bits != low
    there = torch.equal(differ, bits == high) if high != low else not bool(differ.any())
    return differ if there else None
