"""Tensors whose elements all have the same bits: ones, zeros, an expanded scalar.

Exact. One element is kept, as a number in host memory, so a constant takes 8 bytes whatever its size. What
counts is the bits: 0.0 and -0.0 differ, NaNs with one payload are a constant. A complex128 tensor is a
constant only where its real and imaginary parts are the same.
"""

from __future__ import annotations

from ._base import Codec, Encoded, EncodedRow, Tensor, as_bits, extremes, sample


class Constant(Codec):
    """All elements the same: one number."""

    name = "constant"
    exact = True

    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        bits = as_bits(row)
        for part in (bits[:64], sample(bits), bits):
            least, largest = extremes(part)
            if least != largest:
                return None
        return EncodedRow((), (least,))

    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        as_bits(row).fill_(encoded.scalars[0])
