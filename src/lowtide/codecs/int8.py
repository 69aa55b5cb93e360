"""Floats as 8-bit integers, by block of 64: x ≈ code / 127 · M.

Lossy. M, the largest finite magnitude in the block, is kept in the tensor's own dtype: 1.06 bytes a value of
float32, 1.03 of bfloat16. The error is uniform within a block, which suits values of one size; fp8 suits
values of very different sizes. -0.0 becomes 0.0.
"""

from __future__ import annotations

import torch

from ._base import Tensor
from ._blockwise import Blockwise


class Int8(Blockwise):
    """255 levels in each block."""

    name = "int8"
    error_bound = (
        "|x̂ - x| ≤ M/253 + s, M the largest finite magnitude in the block of 64, s the least positive number of "
        "the dtype; in float16 2⁻¹¹·M and in bfloat16 2⁻⁸·M more, from rounding the result"
    )
    code = torch.int8

    def scale_dtype(self, real: torch.dtype) -> torch.dtype:
        """That of the values: M is one of them."""
        return real

    def quantise(self, blocks: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Shares of M, in 127ths."""
        # Divided by M and not by M/127, which may be too small for a normal number.
        divisor = torch.where(largest > 0, largest, 1)
        return (blocks / divisor[:, None]).mul_(127).round_(), largest

    def restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The shares, of M."""
        return codes.div_(127).mul_(scales.to(codes.dtype)[:, None])
