"""Sets of small ints as the bits of one int, so that one operation applies to all members."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import getitem
from typing import Generic, TypeVar

_CHUNK = 8
"""Members that `Weights` adds in one lookup; a byte of the set. Each chunk has a table of 2^8 sums."""

Number = TypeVar("Number", int, float)


def bits_of(members: Iterable[int]) -> int:
    """Return the set of these members."""
    bits = 0
    for member in members:
        bits |= 1 << member
    return bits


def bits_where(flags: Iterable[int | bool]) -> int:
    """Return the set of the indices at which a flag is true."""
    return bits_of(index for index, flag in enumerate(flags) if flag)


def members_of(bits: int) -> list[int]:
    """Return the members, in ascending order."""
    members = []
    while bits:
        lowest = bits & -bits
        members.append(lowest.bit_length() - 1)
        bits ^= lowest
    return members


class Weights(Generic[Number]):
    """Sums of the weights of a set's members. The order of additions is fixed, so equal sets give equal floats."""

    def __init__(self, weights: Sequence[Number]) -> None:
        self._bytes = -(-len(weights) // _CHUNK)
        self._sums: list[list[Number]] = []  # by chunk: the sum for each subset of the chunk
        for start in range(0, len(weights), _CHUNK):
            sums: list[Number] = [weights[start] - weights[start]]  # zero of this type, for the empty subset
            for weight in weights[start : start + _CHUNK]:
                sums += [total + weight for total in sums]
            self._sums.append(sums)

    def total(self, bits: int) -> Number:
        """Return the sum over all members."""
        return sum(map(getitem, self._sums, bits.to_bytes(self._bytes, "little")))
