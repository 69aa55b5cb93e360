"""Schedules that need no thought: keep every state, or every so-maniest, or about √n of them.

Paper: for √n, T. Chen et al., "Training deep nets with sublinear memory cost" (2016).

Guarantee: `keep_all` runs each step once before the sweep and once, taped, in it; the others run each step
at most once more. Shortfall: for the slots they take, `revolve` needs as few steps or fewer; they are here
because they are easy to follow, and to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from ..._errors import ArgumentError
from ._actions import Action, Advance, Free, Load, Reverse, Schedule, Store, Tiers


class Periodic(Schedule):
    """What `periodic`, `sqrt` and `keep_all` return: checkpoints at the multiples of `period`."""

    n: int

    def __init__(self, n: int, period: int, name: str = "periodic") -> None:
        if n < 1:
            raise ArgumentError(f"a chain has at least one step, not {n}")
        if period < 1:
            raise ArgumentError(f"a period is at least one step, not {period}")
        self.n = n
        self.period = period
        self.name = name
        self._segments = -(-n // period)

    def __repr__(self) -> str:
        return f"periodic({self.n}, {self.period})"

    def __iter__(self) -> Iterator[Action]:
        last = (self._segments - 1) * self.period
        for start in range(0, last, self.period):
            yield Store(start)
            yield Advance(start, start + self.period)
        yield from _reverse_storing_all(last, self.n, stored=False)
        for start in range(last - self.period, -1, -self.period):
            yield Load(start)
            yield from _reverse_storing_all(start, start + self.period, stored=True)

    @property
    def forward_steps(self) -> int:
        """The first sweep, each segment but the last once more, and the taped steps."""
        return (self.n - 1) + (self._segments - 1) * (self.period - 1) + self.n

    @property
    def peak_slots(self) -> Tiers:
        """A slot a segment, and those for the states inside the segment being reversed."""
        segments, tail = self._segments, self.n - (self._segments - 1) * self.period
        at_the_end = segments - 1 + (tail - 1)
        before = segments - 2 + max(self.period - 1, 1) if segments > 1 else 0
        return Tiers(memory=max(at_the_end, before))


def _reverse_storing_all(start: int, stop: int, *, stored: bool) -> Iterator[Action]:
    for step in range(start, stop - 1):
        if step != start or not stored:
            yield Store(step)
        yield Advance(step, step + 1)
    if stored and stop - start == 1:
        yield Free(start)
    yield Reverse(stop - 1)
    for step in range(stop - 2, start - 1, -1):
        yield Load(step)
        yield Free(step)
        yield Reverse(step)


def periodic(n: int, period: int) -> Periodic:
    """A checkpoint every `period` steps; within the segment being reversed every state is stored."""
    return Periodic(n, period)


def sqrt(n: int) -> Periodic:
    """`periodic` with the period √n (rounded up), about 2·√n slots."""
    return Periodic(n, isqrt(max(n, 1) - 1) + 1, name="sqrt")


def keep_all(n: int) -> Periodic:
    """Every state is stored; no step is run again but for its tape."""
    return Periodic(n, max(n, 1), name="keep_all")
