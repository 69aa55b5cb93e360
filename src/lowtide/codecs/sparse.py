"""Tensors with many zeros: outputs of ReLU and dropout, attention probabilities under a causal mask.

Exact. The elements that are not zero are kept, and where they were: as a map of one bit an element, or, where
that is smaller (fewer than one in 32 are not zero), as indices. A zero is an element without any bit set, so
-0.0 is kept as it is (and dropout makes -0.0 of what was negative). A float32 tensor of which half are zeros
takes 53 % of its memory.
"""

from __future__ import annotations

import torch

from ._base import Codec, Encoded, EncodedRow, Tensor, as_bits, chunks, index_dtype, sample
from ._bitmap import bitmap_bytes, pack_bits, true_indices, unpack_bits

_MOST = 0.95  # of the sample: with more left than this it cannot be worth the work


class Sparse(Codec):
    """Many zeros: what is not zero, and where it is."""

    name = "sparse"
    exact = True

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        bits = as_bits(row)
        part = sample(bits)
        if int(torch.count_nonzero(part)) > _MOST * len(part):
            return None
        count = int(torch.count_nonzero(bits))
        index = index_dtype(len(bits))
        map_bytes = bitmap_bytes(len(bits))
        if min(map_bytes, count * index.itemsize) + count * bits.dtype.itemsize >= bits.nbytes:
            return None
        kept = torch.empty(count, dtype=bits.dtype, device=bits.device)
        indexed = count * index.itemsize <= map_bytes
        where = torch.empty(
            count if indexed else map_bytes, dtype=index if indexed else torch.uint8, device=bits.device
        )
        done = 0
        for chunk in chunks(len(bits)):
            flags = bits[chunk].to(torch.bool)
            here = true_indices(flags)
            torch.index_select(bits[chunk], 0, here, out=kept[done : done + len(here)])
            if indexed:
                torch.add(here, chunk.start, out=where[done : done + len(here)])
            else:
                where[chunk.start // 8 : bitmap_bytes(chunk.stop)] = pack_bits(flags)
            done += len(here)
        return EncodedRow((kept, where))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        kept, where = encoded.parts
        bits = as_bits(row).zero_()
        if where.dtype is not torch.uint8:
            for chunk in chunks(len(kept)):
                bits.scatter_(0, where[chunk].to(torch.int64), kept[chunk])
            return
        done = 0
        for chunk in chunks(len(bits)):
            here = true_indices(unpack_bits(where, chunk))
            bits[chunk].scatter_(0, here, kept[done : done + len(here)])
            done += len(here)
