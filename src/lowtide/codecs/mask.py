"""mask: tensors with at most two distinct elements, such as bool masks and scaled dropout masks.

Exact, one bit per element. The two elements may have any bit patterns. A bool mask takes 1/8 of its memory,
a float32 mask 1/32. On CPU, NumPy is used because it compares integers seven times as fast as torch. Other
devices use torch ops, with the same result.
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

_FIRST_ELEMENTS = 2048
Elements = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Mask(Codec):
    """Stores one bit per element for tensors with at most two distinct elements."""

    name = "mask"
    exact = True

    def fixed_size(self, dtype: torch.dtype, *, binary: bool = False, device: str = "cpu") -> FixedSize | None:
        """Return one bit per element for bools and for tensors known to be binary."""
        if not (binary or dtype is torch.bool):
            return None
        # NumPy compares each element twice, with results of one byte, and packs them into bits.
        work_bytes = 3 if device == "cpu" else 4 + 2 * dtype.itemsize
        return FixedSize(bits=1, work_bytes_per_element=work_bytes)

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        bits = as_bits(row)
        elements: Any = bits
        pack: Callable[[Any, int, int], Tensor | None] = pack_mask_torch
        two_elements: Callable[[Any], tuple[int, int]] = extremes
        if bits.device.type == "cpu":
            elements, pack, two_elements = bits.numpy(), _pack_mask_numpy, _two_elements
        # The first elements mostly contain both patterns. Searching the whole row would be one more pass.
        low, high = two_elements(elements[:_FIRST_ELEMENTS])
        bitmap = pack(elements, low, high)
        if (
            bitmap is None
            and pack(elements[:_FIRST_ELEMENTS], low, high) is not None
            and (two := extremes(bits)) != (low, high)
        ):
            low, high = two
            bitmap = pack(elements, low, high)
        return None if bitmap is None else EncodedRow((bitmap,), (low, low ^ high))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        (bitmap,) = encoded.parts
        low, difference = encoded.scalars
        bits = as_bits(row)
        if bits.device.type == "cpu":
            _unpack_mask_numpy(bitmap.numpy(), low, low ^ difference, bits.numpy())
        else:
            unpack_mask_torch(bitmap, low, difference, bits)


def _two_elements(elements: Elements) -> tuple[int, int]:
    """Return the smaller and the larger of two distinct elements. With more than two, return any two."""
    first = elements[0]
    other = elements[(elements != first).argmax()]  # the first itself if all are equal
    return (int(first), int(other)) if first < other else (int(other), int(first))


def _pack_mask_numpy(elements: Elements, low: int, high: int) -> Tensor | None:
    """Return the bitmap of the elements equal to `high`, or None if an element is neither `low` nor `high`."""
    bitmap = np.empty(bitmap_bytes(len(elements)), dtype=np.uint8)
    for chunk in chunks(len(elements)):
        part = elements[chunk]
        others = part != low
        # Every `high` is among the others, so equal counts mean that all others are `high`.
        if np.count_nonzero(others) != (np.count_nonzero(part == high) if high != low else 0):
            return None
        bitmap[chunk.start // 8 : bitmap_bytes(chunk.stop)] = np.packbits(others, bitorder=ORDER)
    return torch.from_numpy(bitmap)


def _unpack_mask_numpy(bitmap: Bytes, low: int, high: int, into: Elements) -> None:
    """Write eight elements at a time, looked up by one byte of the bitmap."""
    table = _byte_table(low, high, into.dtype)
    whole = len(into) // 8
    for chunk in chunks(8 * whole):  # NumPy widens the bytes to indices of 64 bits
        rows = bitmap[chunk.start // 8 : chunk.stop // 8]
        # mode="clip" skips the bounds check; the table has a row for every byte.
        np.take(table, rows, axis=0, out=into[chunk].reshape(len(rows), 8), mode="clip")
    if rest := len(into) - 8 * whole:
        into[8 * whole :] = table[bitmap[whole], :rest]


@lru_cache(maxsize=16)
def _byte_table(low: int, high: int, dtype: np.dtype[Any]) -> Elements:
    """Return a table with the eight elements for each of the 256 bytes."""
    every_byte = np.arange(256, dtype=np.uint8)[:, None]
    return np.array([low, high], dtype=dtype)[np.unpackbits(every_byte, axis=1, bitorder=ORDER)]


def pack_mask_torch(bits: Tensor, low: int, high: int) -> Tensor | None:
    """Return the same bitmap as `_pack_mask_numpy`, with torch ops only."""
    bitmap = torch.empty(bitmap_bytes(len(bits)), dtype=torch.uint8, device=bits.device)
    for chunk in chunks(len(bits)):
        part = bits[chunk]
        others = part != low
        if not (torch.equal(others, part == high) if high != low else not bool(others.any())):
            return None
        bitmap[chunk.start // 8 : bitmap_bytes(chunk.stop)] = pack_bits(others)
    return bitmap


def unpack_mask_torch(bitmap: Tensor, low: int, difference: int, into: Tensor) -> None:
    """Write the same elements as `_unpack_mask_numpy`, with torch ops only."""
    for chunk in chunks(len(into)):
        part = into[chunk].copy_(unpack_bits(bitmap, chunk))
        if (low, difference) != (0, 1):
            part.mul_(difference)
            if low:
                part.bitwise_xor_(low)
