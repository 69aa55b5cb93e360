"""constant: tensors whose elements all have the same bits, such as ones, zeros or an expanded scalar.

Exact. One element is stored as a Python number, so any constant takes 8 bytes. Bits are compared: 0.0 and
-0.0 differ, and NaNs with equal payloads are a constant. A complex128 tensor is a constant only if its real
and imaginary parts are equal.
"""

from __future__ import annotations

from ._base import Codec, Encoded, EncodedRow, Tensor, as_bits, extremes, sample


class Constant(Codec):
    """Stores one number for a tensor whose elements are all equal."""

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
