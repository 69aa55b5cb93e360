"""Bools, eight to a byte.

On a CPU NumPy does it. Elsewhere eight bools are one 64-bit word, and a multiplication gathers their bits into its
top byte, or spreads a byte over the word: a few ordinary torch ops, on any device. Both put the first bool into the
lowest bit where the lowest byte comes first; a packed map is not portable between machines.
"""

from __future__ import annotations

import sys
from typing import Literal

import numpy as np
import torch

from ._base import Tensor

# A bool at bit 8i is moved to bit 56 + i by 2^(56 - 7i); no two of the 64 products meet, so nothing carries.
_GATHER = sum(2 ** (56 - 7 * i) for i in range(8))
ORDER: Literal["little", "big"] = "little" if sys.byteorder == "little" else "big"
_SPREAD = 0x0101010101010101
_DIAGONAL = 0x8040201008040201 - 2**64  # byte i of the word keeps bit i


def bitmap_bytes(count: int) -> int:
    """How many bytes so many bools take."""
    return (count + 7) // 8


def pack_bits(flags: Tensor) -> Tensor:
    """Some bools, packed; the last byte is filled up with False."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder=ORDER))
    return pack_bits_torch(flags)


def unpack_bits(packed: Tensor, chunk: slice) -> Tensor:
    """The bools of one of the `chunks`."""
    part, count = packed[chunk.start // 8 : bitmap_bytes(chunk.stop)], chunk.stop - chunk.start
    if packed.device.type == "cpu":
        flags = np.unpackbits(part.numpy(), count=count, bitorder=ORDER)
        return torch.from_numpy(flags).view(torch.bool)
    return unpack_bits_torch(part, count)


def pack_bits_torch(flags: Tensor) -> Tensor:
    """`pack_bits` in torch ops."""
    missing = -len(flags) % 8
    if missing or flags.storage_offset() % 8:
        flags = torch.cat([flags, torch.zeros(missing, dtype=torch.bool, device=flags.device)])
    words: Tensor = flags.view(torch.int64) * _GATHER
    words >>= 56
    words &= 0xFF  # the shift carries the sign along
    return words.to(torch.uint8)


def unpack_bits_torch(packed: Tensor, count: int) -> Tensor:
    """The first `count` bools, in torch ops."""
    words = packed.to(torch.int64)
    words *= _SPREAD
    words &= _DIAGONAL
    # A cast to bool asks whether there is any bit; on a CPU it is ten times as fast as `!= 0`.
    return words.view(torch.uint8)[:count].to(torch.bool)


def true_indices(flags: Tensor) -> Tensor:
    """Where the bools are True."""
    if flags.device.type == "cpu":  # NumPy does it eight times as fast
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().squeeze(1)
