"""Tensors with two different elements, one bit each: bool masks, and scaled dropout masks of any dtype.

Exact. The two may be any bit patterns. A bool takes an eighth of its memory, a float32 mask a 32nd.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ._bitmap import bits_of_bytes, pack_bits, packed_length, unpack_bits
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
        if _which(first, low, high) is None:
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
        if (low, difference) != (0, 1) and bits.device.type == "cpu":
            _look_up(packed.numpy(), low, low ^ difference, bits.numpy())
        else:
            worked_out(packed, low, difference, bits)


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
        # The higher ones are among the others, so that they are all of them if there are as many.
        higher = np.count_nonzero(elements == high) if high != low else 0
        return torch.from_numpy(others) if np.count_nonzero(others) == higher else None
    return compared(bits, low, high)


def compared(bits: Tensor, low: int, high: int) -> Tensor | None:
    """`_which` in torch ops, on any device."""
    differ = bits != low
    there = torch.equal(differ, bits == high) if high != low else not bool(differ.any())
    return differ if there else None


def worked_out(packed: Tensor, low: int, difference: int, bits: Tensor) -> None:
    """`_look_up` in torch ops, on any device."""
    for piece in pieces(len(bits)):
        part = bits[piece].copy_(unpack_bits(packed, piece))
        if (low, difference) != (0, 1):
            part.mul_(difference)
            if low:
                part.bitwise_xor_(low)


def _look_up(packed: npt.NDArray[np.uint8], low: int, high: int, into: npt.NDArray[Any]) -> None:
    """Eight elements at a time, by what a byte says of them."""
    eights = np.array([low, high], dtype=into.dtype)[bits_of_bytes()]
    whole = len(into) // 8
    # With "clip" nothing is checked, and nothing needs to be: there is a row for every byte.
    np.take(eights, packed[:whole], axis=0, out=into[: 8 * whole].reshape(whole, 8), mode="clip")
    if rest := len(into) - 8 * whole:
        into[8 * whole :] = eights[packed[whole], :rest]
