"""fp8: floats as 8-bit e4m3, with a power of two as the scale of each block of 64.

Lossy, 1.03 bytes per value. e4m3 has half the error of e5m2, and scaled blocks do not need the range of
e5m2. Scaling by a power of two is exact, unlike scaling by M/448, and the scale takes two bytes for every
dtype. e4m3 has no infinities; infinities are stored separately, like NaNs.
"""

from __future__ import annotations

import torch

from ._base import Tensor
from ._blockwise import Blockwise

_TOP = 8  # scales the largest magnitude of a block to 2⁷ … 2⁸; the largest e4m3 number is 448


class FP8(Blockwise):
    """Stores each value as e4m3, scaled by block."""

    name = "fp8"
    error_bound = (
        "|x̂ - x| ≤ max(2⁻⁴·|x|, 2⁻¹⁶·M) + s, M the largest finite magnitude in the block of 64, "
        "s the least positive number of the dtype"
    )
    code = torch.uint8  # the bits of e4m3: some libraries do not know the float8 dtypes

    def scale_dtype(self, real: torch.dtype) -> torch.dtype:
        """Return int16: scales are exponents, and those of float64 need eleven bits."""
        return torch.int16

    def quantise(self, blocks: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled and rounded blocks, and the exponents of their largest magnitudes."""
        exponents = torch.frexp(largest).exponent.to(torch.int16)
        return _scaled(blocks, _TOP - exponents).to(torch.float8_e4m3fn).view(torch.uint8), exponents

    def widen(self, codes: Tensor) -> Tensor:
        """Return the codes as float16, divided by 2⁸. Shifting the bits is much faster on CPU than a cast."""
        # s eeee mmm becomes s 0eeee mmm0000000. The exponent bias changes from 7 to 15: a factor of 2⁻⁸.
        return ((codes.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)).view(torch.float16)

    def restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the blocks, scaled back. The factor 2⁻⁸ of `widen` cancels the 2⁸ of `quantise`."""
        return _scaled(codes, scales)


def _scaled(blocks: Tensor, exponents: Tensor) -> Tensor:
    """Return each block times 2^exponent. Two factors are used because a single one may be out of range."""
    half = exponents >> 1
    return blocks * _power(half, blocks.dtype)[:, None] * _power(exponents - half, blocks.dtype)[:, None]


def _power(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^exponents, built from the float format. exp2 is not exact on every device."""
    if dtype is torch.float64:
        return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)
