"""int8: floats as 8-bit integers, in blocks of 64, with x ≈ code / 127 · M.

Lossy. M, the largest finite magnitude in the block, is stored in the dtype of the tensor: 1.06 bytes per
float32 value, 1.03 per bfloat16 value. The error is uniform within a block, which suits values of similar
magnitude; fp8 suits values of very different magnitudes. -0.0 becomes 0.0.
"""

from __future__ import annotations

import torch

from ._base import Tensor
from ._blockwise import Blockwise


class Int8(Blockwise):
    """Stores each value as one of 255 levels of its block."""

    name = "int8"
    error_bound = (
        "|x̂ - x| ≤ M/253 + s, M the largest finite magnitude in the block of 64, s the least positive number of "
        "the dtype; in float16 2⁻¹¹·M and in bfloat16 2⁻⁸·M more, from rounding the result"
    )
    code = torch.int8

    def scale_dtype(self, real: torch.dtype) -> torch.dtype:
        """Return the dtype of the values."""
        return real

    def quantise(self, blocks: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values in units of M/127, and M."""
        # Divide by M first: M/127 may be subnormal.
        divisor = torch.where(largest > 0, largest, 1)
        return (blocks / divisor[:, None]).mul_(127).round_(), largest

    def restore(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the values: code / 127 · M."""
        return codes.div_(127).mul_(scales.to(codes.dtype)[:, None])
