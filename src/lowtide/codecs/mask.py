"""Tensors with two different elements, one bit each: bool masks, and scaled dropout masks of any dtype.

Exact. The two may be any bit patterns. A bool takes an eighth of its memory, a float32 mask a 32nd. On a CPU NumPy does
it (it compares integers seven times as fast), elsewhere torch ops do; what comes out is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ._base import Codec, Encoded, EncodedRow, FixedSize, Tensor, as_bits, chunks, extremes
from ._bitmap import ORDER, bitmap_bytes, pack_bits, unpack_bits

_FIRST = 2048
Elements = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Mask(Codec):
    """At most two different elements: a bit each."""

    name = "mask"
    exact = True

    def fixed_size(self, dtype: torch.dtype, *, binary: bool = False) -> FixedSize | None:
        """A bool is always one of two."""
        known = binary or dtype is torch.bool
        return FixedSize(bits=1, work_bytes_per_element=4 + 2 * dtype.itemsize) if known else None

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        bits = as_bits(row)
        elements: Any = bits
        pack: Callable[[Any, int, int], Tensor | None] = pack_mask_torch
        two_of: Callable[[Any], tuple[int, int]] = extremes
        if bits.device.type == "cpu":
            elements, pack, two_of = bits.numpy(), _pack_mask_numpy, _two_elements
        # What the first have is mostly all there is: looking at everything would be one more pass over the memory.
        low, high = two_of(elements[:_FIRST])
        packed = pack(elements, low, high)
        if packed is None and pack(elements[:_FIRST], low, high) is not None and (two := extremes(bits)) != (low, high):
            low, high = two
            packed = pack(elements, low, high)
        return None if packed is None else EncodedRow((packed,), (low, low ^ high))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        (packed,) = encoded.parts
        low, difference = encoded.scalars
        bits = as_bits(row)
        if bits.device.type == "cpu":
            _unpack_mask_numpy(packed.numpy(), low, low ^ difference, bits.numpy())
        else:
            unpack_mask_torch(packed, low, difference, bits)


def _two_elements(elements: Elements) -> tuple[int, int]:
    """The least and the largest of elements that are no more than two different ones; of others, any two."""
    first = elements[0]
    other = elements[(elements != first).argmax()]  # the first itself, if there is no other
    return (int(first), int(other)) if first < other else (int(other), int(first))


def _pack_mask_numpy(elements: Elements, low: int, high: int) -> Tensor | None:
    """A bit for each element, which says whether it is the one or the other; None if any is neither."""
    packed = np.empty(bitmap_bytes(len(elements)), dtype=np.uint8)
    for chunk in chunks(len(elements)):
        part = elements[chunk]
        others = part != low
        # The higher ones are among the others, so that they are all of them if there are as many.
        if np.count_nonzero(others) != (np.count_nonzero(part == high) if high != low else 0):
            return None
        packed[chunk.start // 8 : bitmap_bytes(chunk.stop)] = np.packbits(others, bitorder=ORDER)
    return torch.from_numpy(packed)


def _unpack_mask_numpy(packed: Bytes, low: int, high: int, into: Elements) -> None:
    """Eight elements at a time, by what a byte says of them."""
    eights = _byte_table(low, high, into.dtype)
    whole = len(into) // 8
    # With "clip" nothing is checked, and nothing needs to be: there is a row for every byte.
    np.take(eights, packed[:whole], axis=0, out=into[: 8 * whole].reshape(whole, 8), mode="clip")
    if rest := len(into) - 8 * whole:
        into[8 * whole :] = eights[packed[whole], :rest]


@lru_cache(maxsize=16)
def _byte_table(low: int, high: int, dtype: np.dtype[Any]) -> Elements:
    """By byte of a map: the eight elements that it stands for."""
    every_byte = np.arange(256, dtype=np.uint8)[:, None]
    return np.array([low, high], dtype=dtype)[np.unpackbits(every_byte, axis=1, bitorder=ORDER)]


def pack_mask_torch(bits: Tensor, low: int, high: int) -> Tensor | None:
    """`_pack_mask_numpy` in torch ops, on any device."""
    packed = torch.empty(bitmap_bytes(len(bits)), dtype=torch.uint8, device=bits.device)
    for chunk in chunks(len(bits)):
        part = bits[chunk]
        others = part != low
        if not (torch.equal(others, part == high) if high != low else not bool(others.any())):
            return None
        packed[chunk.start // 8 : bitmap_bytes(chunk.stop)] = pack_bits(others)
    return packed


def unpack_mask_torch(packed: Tensor, low: int, difference: int, into: Tensor) -> None:
    """`_unpack_mask_numpy` in torch ops, on any device."""
    for chunk in chunks(len(into)):
        part = into[chunk].copy_(unpack_bits(packed, chunk))
        if (low, difference) != (0, 1):
            part.mul_(difference)
            if low:
                part.bitwise_xor_(low)
