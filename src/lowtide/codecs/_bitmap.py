"""Bit-packing: eight bools in one byte.

On CPU, NumPy packs the bits. On other devices, eight bools are one 64-bit word: a multiplication gathers
their bits in the top byte of the word, or spreads one byte over the word. That needs only a few torch ops,
which run on any device. Both ways store the first bool in the lowest bit on little-endian machines. A bitmap
is not portable between machines of different byte order.
"""

from __future__ import annotations

import sys
from typing import Literal

import numpy as np
import torch

from ._base import Tensor

# Multiplying by 2^(56 - 7i) moves the bool at bit 8i to bit 56 + i. No two of the 64 products overlap,
# so there is no carry.
_GATHER = sum(2 ** (56 - 7 * i) for i in range(8))
ORDER: Literal["little", "big"] = "little" if sys.byteorder == "little" else "big"
_SPREAD = 0x0101010101010101
_DIAGONAL = 0x8040201008040201 - 2**64  # byte i of the word keeps bit i


def bitmap_bytes(count: int) -> int:
    """Return the bytes of a bitmap of `count` bools."""
    return (count + 7) // 8


def pack_bits(flags: Tensor) -> Tensor:
    """Return the bitmap of some bools. The last byte is padded with False."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder=ORDER))
    return pack_bits_torch(flags)


def unpack_bits(bitmap: Tensor, chunk: slice) -> Tensor:
    """Return the bools of one of the `chunks`."""
    part, count = bitmap[chunk.start // 8 : bitmap_bytes(chunk.stop)], chunk.stop - chunk.start
    if bitmap.device.type == "cpu":
        flags = np.unpackbits(part.numpy(), count=count, bitorder=ORDER)
        return torch.from_numpy(flags).view(torch.bool)
    return unpack_bits_torch(part, count)


def pack_bits_torch(flags: Tensor) -> Tensor:
    """Return the same bitmap as `pack_bits`, with torch ops only."""
    missing = -len(flags) % 8
    if missing or flags.storage_offset() % 8:
        flags = torch.cat([flags, torch.zeros(missing, dtype=torch.bool, device=flags.device)])
    words: Tensor = flags.view(torch.int64) * _GATHER
    words >>= 56
    words &= 0xFF  # the shift extends the sign bit
    return words.to(torch.uint8)


def unpack_bits_torch(bitmap: Tensor, count: int) -> Tensor:
    """Return the first `count` bools of a bitmap, with torch ops only."""
    words = bitmap.to(torch.int64)
    words *= _SPREAD
    words &= _DIAGONAL
    # On CPU, a cast to bool is ten times as fast as `!= 0`.
    return words.view(torch.uint8)[:count].to(torch.bool)


def true_indices(flags: Tensor) -> Tensor:
    """Return the indices of the bools that are True."""
    if flags.device.type == "cpu":  # NumPy is eight times as fast
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().squeeze(1)
