"""Floats in bfloat16: the exponents of float32, eight bits of precision.

Lossy, half of a float32. Scaled only where M, the largest finite magnitude, is too large or too small to leave
room below it; what bfloat16 represents is exact otherwise.
"""

from __future__ import annotations

import math

import torch

from ._half_precision import HalfPrecision


class BF16(HalfPrecision):
    """Each value as bfloat16."""

    name = "bf16"
    error_bound = (
        "|x̂ - x| ≤ max(2⁻⁸·|x|, 2⁻⁶⁶·M) + s, M the largest finite magnitude in the tensor, "
        "s the least positive number of its dtype"
    )
    narrow = torch.bfloat16

    def exponent(self, largest: float) -> int:
        """0 for M in 2⁻⁶⁰ … 2¹²⁷, else what brings M just below 1."""
        return 0 if largest == 0 or 2.0**-60 <= largest < 2.0**127 else math.frexp(largest)[1]
