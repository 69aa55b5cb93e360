"""Tensors with two different elements, one bit each: bool masks, and scaled dropout masks of any dtype.

Exact. The two may be any bit patterns. A bool takes an eighth of its memory, a float32 mask a 32nd.
"""

from __future__ import annotations

import torch

from ._bitmap import pack_bits, packed_length, unpack_bits
from ._contract import Codec, Encoded, FixedSize, Packed, Tensor, as_bits, extremes, pieces, sample


class Mask(Codec):
    """At most two different elements: a bit each."""

    name = "mask"
    exact = True

    def fixed_size(self, dtype: torch.dtype) -> FixedSize | None:
        """A bool is always one of two."""
        return FixedSize(bits=1, work_bytes=6) if dtype is torch.bool else None

    def _pack(self, row: Tensor) -> Packed | None:
        bits = as_bits(row)
        for part in (bits[:256], sample(bits)):
            low, high = extremes(part)
            if not bool(((part == low) | (part == high)).all()):
                return None
        low, high = extremes(bits)
        difference = low ^ high
        packed = torch.empty(packed_length(len(bits)), dtype=torch.uint8, device=bits.device)
        for piece in pieces(len(bits)):
            distance = bits[piece] ^ low
            flags = distance.to(torch.bool)
            # Where the two differ in the last bit alone, they are neighbours: nothing is between them.
            if difference != 1 and not torch.equal(distance, flags.to(bits.dtype).mul_(difference)):
                return None
            packed[piece.start // 8 : packed_length(piece.stop)] = pack_bits(flags)
        return Packed((packed,), (low, difference))

    def _unpack(self, encoded: Encoded, row: Tensor) -> None:
        (packed,) = encoded.parts
        low, difference = encoded.scalars
        bits = as_bits(row)
        for piece in pieces(len(bits)):
            part = bits[piece].copy_(unpack_bits(packed, piece))
            if (low, difference) != (0, 1):
                part.mul_(difference).bitwise_xor_(low)
