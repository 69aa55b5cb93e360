"""bf16: floats as bfloat16, with the exponents of float32 and eight bits of precision.

Lossy, half the size of float32. The tensor is scaled only if M, the largest finite magnitude, is close to
the limits of bfloat16. Otherwise values that bfloat16 can represent are restored exactly.
"""

from __future__ import annotations

import math

import torch

from ._half_precision import HalfPrecision


class BF16(HalfPrecision):
    """Stores each value as bfloat16."""

    name = "bf16"
    error_bound = (
        "|x̂ - x| ≤ max(2⁻⁸·|x|, 2⁻⁶⁶·M) + s, M the largest finite magnitude in the tensor, "
        "s the least positive number of its dtype"
    )
    narrow = torch.bfloat16

    def exponent(self, largest: float) -> int:
        """Return 0 for M in 2⁻⁶⁰ … 2¹²⁷, else the exponent that brings M just below 1."""
        return 0 if largest == 0 or 2.0**-60 <= largest < 2.0**127 else math.frexp(largest)[1]
