"""Tensors with many zeros: outputs of ReLU and dropout, attention probabilities under a causal mask.

Exact. The elements that are not zero are kept, and where they were: as a map of one bit an element, or, where
that is smaller (fewer than one in 32 are not zero), as indices. A zero is an element without any bit set, so
-0.0 is kept as it is (and dropout makes -0.0 of what was negative). A float32 tensor of which half are zeros
takes 53 % of its memory.
"""

from __future__ import annotations

import torch

from ._bitmap import pack_bits, packed_length, places_of, unpack_bits
from ._contract import Codec, Encoded, Packed, Tensor, as_bits, index_dtype, pieces, sample

_MOST = 0.95  # of the sample: with more left than this it cannot be worth the work


class Sparse(Codec):
    """Many zeros: what is not zero, and where it is."""

    name = "sparse"
    exact = True

    def _pack(self, row: Tensor) -> Packed | None:
        bits = as_bits(row)
        part = sample(bits)
        if int(torch.count_nonzero(part)) > _MOST * len(part):
            return None
        count = int(torch.count_nonzero(bits))
        index = index_dtype(len(bits))
        map_bytes = packed_length(len(bits))
        if min(map_bytes, count * index.itemsize) + count * bits.dtype.itemsize >= bits.nbytes:
            return None
        kept = torch.empty(count, dtype=bits.dtype, device=bits.device)
        indexed = count * index.itemsize <= map_bytes
        where = torch.empty(
            count if indexed else map_bytes, dtype=index if indexed else torch.uint8, device=bits.device
        )
        done = 0
        for piece in pieces(len(bits)):
            flags = bits[piece].to(torch.bool)
            here = places_of(flags)
            torch.index_select(bits[piece], 0, here, out=kept[done : done + len(here)])
            if indexed:
                torch.add(here, piece.start, out=where[done : done + len(here)])
            else:
                where[piece.start // 8 : packed_length(piece.stop)] = pack_bits(flags)
            done += len(here)
        return Packed((kept, where))

    def _unpack(self, encoded: Encoded, row: Tensor) -> None:
        kept, where = encoded.parts
        bits = as_bits(row).zero_()
        if where.dtype is not torch.uint8:
            for piece in pieces(len(kept)):
                bits.scatter_(0, where[piece].to(torch.int64), kept[piece])
            return
        done = 0
        for piece in pieces(len(bits)):
            here = places_of(unpack_bits(where, piece))
            bits[piece].scatter_(0, here, kept[done : done + len(here)])
            done += len(here)
