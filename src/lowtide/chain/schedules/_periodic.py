"""Simple schedules, for comparison: store every state, every period-th state, or about √n states.

Paper: for √n, T. Chen et al., "Training deep nets with sublinear memory cost" (2016).

Guarantee: `keep_all` runs each step once in the forward sweep and once, taped, in the reverse sweep. The
others run each step at most once more. Limits: with the same slots, `revolve` takes as many steps or fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from ..._errors import ArgumentError
from ._actions import Action, Advance, Free, Load, Reverse, Schedule, Store, Tiers


class Periodic(Schedule):
    """The schedule of `periodic`, `sqrt` and `keep_all`: checkpoints at the multiples of `period`."""

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
        """Steps of the forward sweep, of each segment but the last once more, and the taped steps."""
        return (self.n - 1) + (self._segments - 1) * (self.period - 1) + self.n

    @property
    def peak_slots(self) -> Tiers:
        """One slot per segment, plus the states inside the segment being reversed."""
        segments, last_length = self._segments, self.n - (self._segments - 1) * self.period
        in_last = segments - 1 + (last_length - 1)
        in_others = segments - 2 + max(self.period - 1, 1) if segments > 1 else 0
        return Tiers(memory=max(in_last, in_others))


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
    """Return a schedule with a checkpoint every `period` steps. Reversing a segment stores all of its states."""
    return Periodic(n, period)


def sqrt(n: int) -> Periodic:
    """Return `periodic` with the period √n, rounded up. Takes about 2·√n slots."""
    return Periodic(n, isqrt(max(n, 1) - 1) + 1, name="sqrt")


def keep_all(n: int) -> Periodic:
    """Return a schedule that stores every state. Each step runs once more only to be taped."""
    return Periodic(n, max(n, 1), name="keep_all")
