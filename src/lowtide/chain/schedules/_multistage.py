"""The cheapest schedule over two tiers: a few slots in memory, which cost nothing, and some on disk.

Papers: G. Aupy, J. Herrmann, P. Hovland and Y. Robert, "Optimal multistage algorithm for adjoint
computation", SIAM J. Sci. Comput. 38 (2016); J. Herrmann and G. Pallez, "H-Revolve: a framework for adjoint
computation on synchronous hierarchical platforms", ACM TOMS 46 (2020).

Guarantee: the least cost, where a forward step costs 1, a write to disk `write_cost` and a read from it
`read_cost`; neither tier is ever exceeded. Checkpoints on disk come before those in memory, so that with d
free slots on disk, M the binomial optimum in memory, F the cost from x_0 as the working state, and H the
same where x_0 is also on disk (in a slot that is not among the d):

    B(l, d) = min_k k + F(l−k, d) + read + H(k, d)          x_0 waits on disk
    F(l, d) = min{ M(l), write + B(l, d−1) }
    H(l, d) = min{ M(l), B(l, d) }

Time O(n²·d) in vector operations, memory O(n·d), independent of the slots in memory.

Shortfall: that disk comes first is taken from the papers (and confirmed by exhaustive search over small
chains, in the tests), not proven here. A write that overlaps with computation is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..._errors import ArgumentError
from ._actions import Action, Advance, Free, Load, Schedule, Store, Tiers
from ._revolve import binomial_steps, check_counts, reverse_segment

_Floats = npt.NDArray[np.float64]


class _InMemory(NamedTuple):
    """The steps `start` … `stop - 1`, to be reversed without the disk."""

    start: int
    stop: int


class _Plan(NamedTuple):
    """The tables of the recursion; rows are d, and `fresh` runs back to front."""

    memory: _Floats
    """M(l)."""
    kept: _Floats
    """[d, k]: k + read + H(k, d)."""
    fresh: _Floats
    """[d, n − l]: F(l, d)."""

    def waiting(self, d: int, length: int) -> tuple[float, int]:
        """B(length, d) and its k."""
        n = len(self.memory) - 1
        sums = self.kept[d, 1:length] + self.fresh[d, n - length + 1 : n]
        k = int(sums.argmin())
        return float(sums[k]), k + 1


def _plan(n: int, memory_slots: int, disk_slots: int, write_cost: float, read_cost: float) -> _Plan:
    memory = np.full(n + 1, np.inf)
    memory[1] = 1.0
    if memory_slots:
        memory[2:] = [binomial_steps(length, memory_slots) for length in range(2, n + 1)]
    kept = np.full((disk_slots + 1, n + 1), np.inf)
    fresh = np.full((disk_slots + 1, n + 1), np.inf)
    kept[:, 1] = 2.0 + read_cost
    fresh[:, n - 1] = 1.0
    fresh[0, :n] = memory[:0:-1]
    work = np.empty((disk_slots + 1, n + 1))
    waiting = np.empty(disk_slots)
    for length in range(2, n + 1 if disk_slots else 0):
        # With d slots on disk in all, d − 1 are free while x_0 takes one: the last row is only for F.
        sums = np.add(kept[:-1, 1:length], fresh[:-1, n - length + 1 : n], out=work[:-1, : length - 1])
        np.minimum.reduce(sums, axis=1, out=waiting)
        np.minimum(waiting + write_cost, memory[length], out=fresh[1:, n - length])
        np.minimum(waiting, memory[length], out=waiting)
        np.add(waiting, length + read_cost, out=kept[:-1, length])
    return _Plan(memory, kept, fresh)


class Multistage(Schedule):
    """What `multistage` returns."""

    name = "multistage"
    n: int

    def __init__(self, n: int, memory_slots: int, disk_slots: int, write_cost: float, read_cost: float) -> None:
        if memory_slots < 0 or disk_slots < 0:
            raise ArgumentError(f"slots are counted from 0, not {min(memory_slots, disk_slots)}")
        check_counts(n, memory_slots + disk_slots)
        if not (write_cost >= 0 and read_cost >= 0):
            raise ArgumentError(f"a write costs {write_cost} and a read {read_cost}: neither may be negative")
        self.n = n
        self.memory_slots = memory_slots
        self.disk_slots = disk_slots
        self.write_cost = write_cost
        self.read_cost = read_cost

    def __repr__(self) -> str:
        return (
            f"multistage({self.n}, {self.memory_slots}, {self.disk_slots}, "
            f"write_cost={self.write_cost:g}, read_cost={self.read_cost:g})"
        )

    @cached_property
    def _planned(self) -> _Plan:
        return _plan(self.n, self.memory_slots, self._useful_disk_slots, self.write_cost, self.read_cost)

    @property
    def _useful_disk_slots(self) -> int:
        """A chain has no more than n − 1 states to store."""
        return min(self.disk_slots, self.n - 1) if self.memory_slots < self.n - 1 else 0

    def __iter__(self) -> Iterator[Action]:
        for part in self._outline():
            if isinstance(part, _InMemory):
                yield from reverse_segment(part.start, part.stop, self.memory_slots)
            else:
                yield part

    def _outline(self) -> Iterator[Action | _InMemory]:
        """Everything that concerns the disk, and between it the segments that are left to memory."""
        plan = self._planned
        free, here, stop, on_disk = self._useful_disk_slots, 0, self.n, False
        held: list[int] = []
        while True:
            while (length := stop - here) > 1:
                if on_disk:
                    cost, k = plan.waiting(free, length)
                    if plan.memory[length] <= cost:
                        break
                elif free:
                    cost, k = plan.waiting(free - 1, length)
                    if plan.memory[length] <= cost + self.write_cost:
                        break
                    yield Store(here, "disk")
                    free -= 1
                else:
                    break
                held.append(here)
                yield Advance(here, here + k)
                here, on_disk = here + k, False
            if on_disk:
                yield Free(here, "disk")
                free += 1
            yield _InMemory(here, stop)
            if not held:
                return
            stop, here, on_disk = here, held.pop(), True
            yield Load(here, "disk")

    @cached_property
    def _counted(self) -> tuple[int, Tiers]:
        """Forward steps and peaks, from the outline and the closed formula for what it leaves to memory."""
        steps = most_in_memory = on_disk = most_on_disk = 0
        for part in self._outline():
            match part:
                case _InMemory(start, stop):
                    steps += binomial_steps(stop - start, self.memory_slots)
                    most_in_memory = max(most_in_memory, min(self.memory_slots, stop - start - 1))
                case Advance(start, stop):
                    steps += stop - start
                case Store():
                    on_disk += 1
                    most_on_disk = max(most_on_disk, on_disk)
                case Free():
                    on_disk -= 1
        return steps, Tiers(most_in_memory, most_on_disk)

    @property
    def forward_steps(self) -> int:
        """Of the schedule of least cost; one with fewer steps may cost more."""
        return self._counted[0]

    @property
    def peak_slots(self) -> Tiers:
        """Never more than were given; fewer where a slot on disk is not worth its price."""
        return self._counted[1]

    @property
    def cost(self) -> float:
        """Forward steps, writes to disk and reads from it."""
        return float(self._planned.fresh[self._useful_disk_slots, 0])


def multistage(n: int, memory_slots: int, disk_slots: int, write_cost: float, read_cost: float) -> Multistage:
    """The cheapest schedule with `memory_slots` free of charge and `disk_slots` that cost.

    `write_cost` and `read_cost` are in units of one forward step.
    """
    return Multistage(n, memory_slots, disk_slots, write_cost, read_cost)
