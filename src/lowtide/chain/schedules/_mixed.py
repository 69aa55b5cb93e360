"""The schedule in which a slot holds a state or a tape, whichever saves more steps.

Paper: J. R. Maddison, "Step-based checkpointing with high-level algorithmic differentiation", Journal of
Computational Science 82 (2024).

Guarantee: the fewest forward steps for n equal steps and c slots, where a tape (the data of one reverse
step) fits into a slot. With M(n, c) the steps from x_0 as the working state,
M(1, c) = 1 and M(n, c) = min{ 1 + M(n−1, c−1),  min_k k + M(n−k, c−1) + M(k, c) }: tape the first step, or
store x_0 and go on k steps. Time O(n²·c) in vector operations, memory O(n·c).

Shortfall: M is not convex in n, so that no closed formula for k is known; a chain of 10,000 steps takes
seconds to plan. Tapes larger than states do not fit this problem: see `heterogeneous`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ._actions import Action, Advance, Free, Load, Reverse, Schedule, Store, Tiers
from ._revolve import check_counts


def _plan(n: int, slots: int) -> tuple[int, list[npt.NDArray[np.int32]]]:
    """The least number of steps, and for c free slots and m steps the k of the recursion (0: tape)."""
    if slots >= n - 1:
        return n, [np.zeros(n + 1, dtype=np.int32)] * (slots + 1)
    # For n steps a sum stays below n², so 32 bits do for all but very long chains, and are twice as fast.
    kind: type[np.signedinteger] = np.int32 if n < 30_000 else np.int64
    far = np.iinfo(kind).max // 4
    with_less = np.full(n + 1, far, dtype=kind)  # M(·, c − 1), at first for c = 1
    with_less[1] = 1
    splits: list[npt.NDArray[np.int32]] = [np.zeros(n + 1, dtype=np.int32)]
    work = np.empty(n + 1, dtype=kind)
    for c in range(1, slots + 1):
        steps = np.full(n + 1, far, dtype=kind)
        left = np.full(n + 1, far, dtype=kind)  # k + M(k, c)
        split = np.zeros(n + 1, dtype=np.int32)
        right = with_less[::-1].copy()  # right[n − j] = M(j, c − 1): contiguous where the loop reads it
        # With a slot for each step but the last, every step is taped.
        reach = min(n, c + 1)
        steps[1 : reach + 1] = np.arange(1, reach + 1)
        left[1 : reach + 1] = 2 * steps[1 : reach + 1]
        for m in range(reach + 1, n + 1):
            sums = np.add(left[1:m], right[n - m + 1 : n], out=work[: m - 1])
            k = int(sums.argmin())
            best = int(sums[k])
            tape = int(with_less[m - 1]) + 1
            if best < tape:
                split[m] = k + 1
            else:
                best = tape
            steps[m] = best
            left[m] = best + m
        splits.append(split)
        with_less = steps
    return int(with_less[n]), splits


class Mixed(Schedule):
    """What `mixed` returns."""

    name = "mixed"
    n: int

    def __init__(self, n: int, slots: int) -> None:
        check_counts(n, slots)
        self.n = n
        self.slots = slots

    def __repr__(self) -> str:
        return f"mixed({self.n}, {self.slots})"

    def __iter__(self) -> Iterator[Action]:
        _, splits = self._planned
        held: list[tuple[int, bool]] = []  # what the slots hold, in order: a step, and whether it is a tape
        here, stop, free = 0, self.n, self.peak_slots.memory
        while True:
            # Working state x_here, steps here … stop − 1 to reverse, `free` slots, x_here not among the held.
            again = bool(held) and held[-1] == (here, False)
            if again:
                free += 1
            while stop - here > 1:
                k = int(splits[free][stop - here])
                if k:
                    if not again:
                        yield Store(here)
                        held.append((here, False))
                    yield Advance(here, here + k)
                    here += k
                else:
                    if again:
                        yield Free(here)
                        held.pop()
                    yield Store(here, what="tape")
                    held.append((here, True))
                    here += 1
                free -= 1
                again = False
            if again:
                yield Free(here)
                held.pop()
            yield Reverse(here)
            while held and held[-1][1]:
                here, _ = held.pop()
                yield Reverse(here, source="tape")
                yield Free(here, what="tape")
                free += 1
            if not held:
                return
            stop, here = here, held[-1][0]
            yield Load(here)

    @cached_property
    def _planned(self) -> tuple[int, list[npt.NDArray[np.int32]]]:
        return _plan(self.n, self.peak_slots.memory)

    @property
    def forward_steps(self) -> int:
        """M(n, c)."""
        return self._planned[0]

    @property
    def peak_slots(self) -> Tiers:
        """All of them, unless the chain is shorter."""
        return Tiers(memory=min(self.slots, self.n - 1))


def mixed(n: int, slots: int) -> Mixed:
    """The schedule with the fewest forward steps where a slot may hold a state or a tape.

    >>> print(mixed(1000, 10).explain())
    mixed: 1,000 steps reversed with 3,921 forward steps (3.92 × n), at most 10 slots in memory
    """
    return Mixed(n, slots)
