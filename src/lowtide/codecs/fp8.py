"""Floats in eight bits, e4m3 with a power of two for each block of 64.

Lossy, 1.03 bytes a value. e4m3 and not e5m2: with a scale for each block the range of e5m2 is not needed, and
e4m3 has half its error. A power of two and not M/448: scaling is then exact, and the scale is two bytes
for any dtype (for float64 too). e4m3 has no infinities; those are kept apart like NaNs.
"""

from __future__ import annotations

import torch

from ._base import Tensor
from ._blockwise import Blockwise

_TOP = 8  # the largest magnitude of a block is brought to 2⁷ … 2⁸, below the largest of e4m3, 448


class FP8(Blockwise):
    """Each value as e4m3, scaled by block."""

    name = "fp8"
    error_bound = (
        "|x̂ - x| ≤ max(2⁻⁴·|x|, 2⁻¹⁶·M) + s, M the largest finite magnitude in the block of 64, "
        "s the least positive number of the dtype"
    )
    code = torch.uint8  # the bits of an e4m3, which not everything that stores tensors knows

    def scale_dtype(self, real: torch.dtype) -> torch.dtype:
        """Exponents: those of float64 need eleven bits."""
        return torch.int16

    def quantise(self, blocks: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """The blocks scaled and rounded, and the exponents of their largest magnitudes."""
        exponents = torch.frexp(largest).exponent.to(torch.int16)
        return _scaled(blocks, _TOP - exponents).to(torch.float8_e4m3fn).view(torch.uint8), exponents

    def widen(self, codes: Tensor) -> Tensor:
        """As float16, divided by 2⁸: the same bits moved, and much faster on a CPU than a cast."""
        # s eeee mmm becomes s 0eeee mmm0000000, whose exponent counts from 15 and not from 7.
        return ((codes.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)).view(torch.float16)

    def restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The blocks, scaled back; that they come divided by 2⁸ is just what is wanted."""
        return _scaled(codes, scales)


def _scaled(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Each block times 2 to its exponent, in two factors, because one may be out of range."""
    half = exponents >> 1
    return blocks * _power(half, blocks.dtype)[:, None] * _power(exponents - half, blocks.dtype)[:, None]


def _power(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2 to these powers, from the bits of the format: exact on every device, which exp2 need not be."""
    if dtype is torch.float64:
        return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)
