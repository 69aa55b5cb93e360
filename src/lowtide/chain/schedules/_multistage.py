"""The cheapest schedule over two tiers: slots in memory, which cost nothing, and slots on disk.

Papers: G. Aupy, J. Herrmann, P. Hovland and Y. Robert, "Optimal multistage algorithm for adjoint
computation", SIAM J. Sci. Comput. 38 (2016); J. Herrmann and G. Pallez, "H-Revolve: a framework for adjoint
computation on synchronous hierarchical platforms", ACM TOMS 46 (2020).

Guarantee: minimal cost, if a forward step costs 1, a write to disk `write_cost` and a read from disk
`read_cost`. Neither tier is ever exceeded. Checkpoints on disk come before those in memory. For l steps and
d free slots on disk, M is the binomial optimum in memory, F the cost from the working state x_0, and H the
same cost if x_0 is also on disk, in a slot that d does not count:

    B(l, d) = min_k k + F(l−k, d) + read + H(k, d)          advance k steps, read x_0 from disk later
    F(l, d) = min{ M(l), write + B(l, d−1) }
    H(l, d) = min{ M(l), B(l, d) }

Time O(n²·d) in vector operations, memory O(n·d), independent of the slots in memory.

Limits: the order of the tiers is taken from the papers and confirmed by exhaustive search over small chains
in the tests, not proven here. Writes that overlap with computation are not modelled.
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
    """The steps `start` … `stop - 1`, reversed without the disk."""

    start: int
    stop: int


class _Plan(NamedTuple):
    """The tables of the recursion. Rows are d."""

    memory: _Floats
    """[l]: M(l)."""
    on_disk: _Floats
    """[d, k]: k + read + H(k, d)."""
    not_on_disk: _Floats
    """[d, n − l]: F(l, d)."""

    def split(self, d: int, length: int) -> tuple[float, int]:
        """Return B(length, d) and its k."""
        n = len(self.memory) - 1
        sums = self.on_disk[d, 1:length] + self.not_on_disk[d, n - length + 1 : n]
        k = int(sums.argmin())
        return float(sums[k]), k + 1


def _plan(n: int, memory_slots: int, disk_slots: int, write_cost: float, read_cost: float) -> _Plan:
    memory = np.full(n + 1, np.inf)
    memory[1] = 1.0
    if memory_slots:
        memory[2:] = [binomial_steps(length, memory_slots) for length in range(2, n + 1)]
    on_disk = np.full((disk_slots + 1, n + 1), np.inf)
    not_on_disk = np.full((disk_slots + 1, n + 1), np.inf)
    on_disk[:, 1] = 2.0 + read_cost
    not_on_disk[:, n - 1] = 1.0
    not_on_disk[0, :n] = memory[:0:-1]
    work = np.empty((disk_slots + 1, n + 1))
    best = np.empty(disk_slots)
    for length in range(2, n + 1 if disk_slots else 0):
        # x_0 takes one slot on disk, so B needs only the rows d < disk_slots. The last row is only for F.
        sums = np.add(on_disk[:-1, 1:length], not_on_disk[:-1, n - length + 1 : n], out=work[:-1, : length - 1])
        np.minimum.reduce(sums, axis=1, out=best)
        np.minimum(best + write_cost, memory[length], out=not_on_disk[1:, n - length])
        np.minimum(best, memory[length], out=best)
        np.add(best, length + read_cost, out=on_disk[:-1, length])
    return _Plan(memory, on_disk, not_on_disk)


class Multistage(Schedule):
    """The schedule of `multistage`."""

    name = "multistage"
    n: int

    def __init__(self, n: int, memory_slots: int, disk_slots: int, write_cost: float, read_cost: float) -> None:
        if memory_slots < 0 or disk_slots < 0:
            raise ArgumentError(f"slots must not be negative, not {min(memory_slots, disk_slots)}")
        check_counts(n, memory_slots + disk_slots)
        if not (write_cost >= 0 and read_cost >= 0):
            raise ArgumentError(f"write_cost={write_cost} and read_cost={read_cost}: neither may be negative")
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
    def _plan(self) -> _Plan:
        return _plan(self.n, self.memory_slots, self._useful_disk_slots, self.write_cost, self.read_cost)

    @property
    def _useful_disk_slots(self) -> int:
        """The slots on disk, at most the n − 1 states that can be stored, 0 if all of them fit in memory."""
        return min(self.disk_slots, self.n - 1) if self.memory_slots < self.n - 1 else 0

    def __iter__(self) -> Iterator[Action]:
        for part in self._outline():
            if isinstance(part, _InMemory):
                yield from reverse_segment(part.start, part.stop, self.memory_slots)
            else:
                yield part

    def _outline(self) -> Iterator[Action | _InMemory]:
        """Yield the actions that concern the disk, and the segments in between that only use memory."""
        plan = self._plan
        free, here, stop, on_disk = self._useful_disk_slots, 0, self.n, False
        held: list[int] = []
        while True:
            while (length := stop - here) > 1:
                if on_disk:
                    cost, k = plan.split(free, length)
                    if plan.memory[length] <= cost:
                        break
                elif free:
                    cost, k = plan.split(free - 1, length)
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
    def _counts(self) -> tuple[int, Tiers]:
        """Forward steps and peak slots, from the outline and the binomial formula for segments in memory."""
        steps = memory_peak = disk = disk_peak = 0
        for part in self._outline():
            match part:
                case _InMemory(start, stop):
                    steps += binomial_steps(stop - start, self.memory_slots)
                    memory_peak = max(memory_peak, min(self.memory_slots, stop - start - 1))
                case Advance(start, stop):
                    steps += stop - start
                case Store():
                    disk += 1
                    disk_peak = max(disk_peak, disk)
                case Free():
                    disk -= 1
        return steps, Tiers(memory_peak, disk_peak)

    @property
    def forward_steps(self) -> int:
        """Forward steps of the cheapest schedule. A schedule with fewer steps may cost more."""
        return self._counts[0]

    @property
    def peak_slots(self) -> Tiers:
        """Peak slots in use, at most the given ones. Slots on disk that do not pay off stay unused."""
        return self._counts[1]

    @property
    def cost(self) -> float:
        """Cost of forward steps, writes to disk and reads from disk."""
        return float(self._plan.not_on_disk[self._useful_disk_slots, 0])


def multistage(n: int, memory_slots: int, disk_slots: int, write_cost: float, read_cost: float) -> Multistage:
    """Return the cheapest schedule for slots in memory, which cost nothing, and slots on disk.

    `write_cost` and `read_cost` are in units of one forward step.
    """
    return Multistage(n, memory_slots, disk_slots, write_cost, read_cost)
