"""sparse: tensors with many zeros, such as outputs of ReLU and dropout, and causal attention probabilities.

Exact. The nonzero elements are stored with a bitmap of their positions, or with indices if indices are
smaller (fewer than one nonzero element in 32). Only an element without any bit set is a zero, so -0.0 is
restored exactly; dropout turns negative values into -0.0. A float32 tensor with 50 % zeros takes 53 % of its
memory.
"""

from __future__ import annotations

import torch

from ._base import Codec, Encoded, EncodedRow, Tensor, as_bits, chunks, index_dtype, sample
from ._bitmap import bitmap_bytes, pack_bits, true_indices, unpack_bits

_MAX_NONZERO_SHARE = 0.95  # if more of the sample is nonzero, the tensor is not compressed


class Sparse(Codec):
    """Stores the nonzero elements and their positions."""

    name = "sparse"
    exact = True

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        bits = as_bits(row)
        part = sample(bits)
        if int(torch.count_nonzero(part)) > _MAX_NONZERO_SHARE * len(part):
            return None
        count = int(torch.count_nonzero(bits))
        index = index_dtype(len(bits))
        bitmap_size = bitmap_bytes(len(bits))
        if min(bitmap_size, count * index.itemsize) + count * bits.dtype.itemsize >= bits.nbytes:
            return None
        nonzero = torch.empty(count, dtype=bits.dtype, device=bits.device)
        indexed = count * index.itemsize <= bitmap_size
        positions = torch.empty(
            count if indexed else bitmap_size, dtype=index if indexed else torch.uint8, device=bits.device
        )
        done = 0
        for chunk in chunks(len(bits)):
            flags = bits[chunk].to(torch.bool)
            found = true_indices(flags)
            torch.index_select(bits[chunk], 0, found, out=nonzero[done : done + len(found)])
            if indexed:
                torch.add(found, chunk.start, out=positions[done : done + len(found)])
            else:
                positions[chunk.start // 8 : bitmap_bytes(chunk.stop)] = pack_bits(flags)
            done += len(found)
        return EncodedRow((nonzero, positions))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        nonzero, positions = encoded.parts
        bits = as_bits(row).zero_()
        if positions.dtype is not torch.uint8:
            for chunk in chunks(len(nonzero)):
                bits.scatter_(0, positions[chunk].to(torch.int64), nonzero[chunk])
            return
        done = 0
        for chunk in chunks(len(bits)):
            found = true_indices(unpack_bits(positions, chunk))
            bits[chunk].scatter_(0, found, nonzero[done : done + len(found)])
            done += len(found)
