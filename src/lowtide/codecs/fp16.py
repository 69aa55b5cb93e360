"""fp16: floats as float16, with eleven bits of precision and few exponents.

Lossy, half the size of float32. The tensor is scaled so that M, its largest finite magnitude, is in
2¹⁴ … 2¹⁵. No value overflows, and only values 2²⁹ times smaller than M lose relative precision.
"""

from __future__ import annotations

import math

import torch

from ._half_precision import HalfPrecision


class FP16(HalfPrecision):
    """Stores each value as float16, scaled by one power of two."""

    name = "fp16"
    error_bound = (
        "|x̂ - x| ≤ max(2⁻¹¹·|x|, 2⁻³⁸·M) + s, M the largest finite magnitude in the tensor, "
        "s the least positive number of its dtype"
    )
    narrow = torch.float16

    def exponent(self, largest: float) -> int:
        """Return the exponent that brings M to 2¹⁴ … 2¹⁵."""
        return 0 if largest == 0 else math.frexp(largest)[1] - 15
