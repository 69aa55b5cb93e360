"""Floats in float16: eleven bits of precision, few exponents.

Lossy, half of a float32. The largest finite magnitude M is brought to 2¹⁴ … 2¹⁵, so nothing overflows, and
only what is 2²⁹ times smaller than M loses relative precision.
"""

from __future__ import annotations

import math

import torch

from ._half_precision import HalfPrecision


class FP16(HalfPrecision):
    """Each value as float16, all scaled by one power of two."""

    name = "fp16"
    error_bound = (
        "|x̂ - x| ≤ max(2⁻¹¹·|x|, 2⁻³⁸·M) + s, M the largest finite magnitude in the tensor, "
        "s the least positive number of its dtype"
    )
    narrow = torch.float16

    def exponent(self, largest: float) -> int:
        """What brings M to 2¹⁴ … 2¹⁵."""
        return 0 if largest == 0 else math.frexp(largest)[1] - 15
