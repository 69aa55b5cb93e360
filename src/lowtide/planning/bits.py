"""Sets of small numbers as the bits of an int: one operation for all of their members at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import getitem
from typing import Generic, TypeVar

_CHUNK = 8

Number = TypeVar("Number", int, float)


def bits_of(members: Iterable[int]) -> int:
    """The set of these."""
    found = 0
    for member in members:
        found |= 1 << member
    return found


def where(flags: Iterable[int | bool]) -> int:
    """The set of the places at which something is true."""
    return bits_of(place for place, flag in enumerate(flags) if flag)


def members_of(bits: int) -> list[int]:
    """Who is in it, the smallest first."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


class Weights(Generic[Number]):
    """Adds up the weights of a set's members, several at a time. Always in the same order: sums are the same, too."""

    def __init__(self, weights: Sequence[Number]) -> None:
        self._bytes = -(-len(weights) // _CHUNK)
        self._sums: list[list[Number]] = []
        for start in range(0, len(weights), _CHUNK):
            sums: list[Number] = [weights[start] - weights[start]]  # of nothing
            for weight in weights[start : start + _CHUNK]:
                sums += [so_far + weight for so_far in sums]
            self._sums.append(sums)

    def total(self, bits: int) -> Number:
        """Of all members."""
        return sum(map(getitem, self._sums, bits.to_bytes(self._bytes, "little")))
