"""The schedule with the fewest forward steps if a slot may hold a state or a tape.

Paper: J. R. Maddison, "Step-based checkpointing with high-level algorithmic differentiation", Journal of
Computational Science 82 (2024).

Guarantee: the fewest forward steps for n equal steps and c slots, if a tape (the data to reverse one step)
fits into a slot. Let M(n, c) be the steps from the working state x_0. Then M(1, c) = 1 and
M(n, c) = min{ 1 + M(n−1, c−1),  min_k k + M(n−k, c−1) + M(k, c) }: tape the first step, or store x_0 and
advance k steps. Time O(n²·c) in vector operations, memory O(n·c).

Limits: M is not convex in n, so no closed formula for k is known. Planning 10,000 steps takes seconds. For
tapes larger than states use `heterogeneous`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ._actions import Action, Advance, Free, Load, Reverse, Schedule, Store, Tiers
from ._revolve import check_counts


def _plan(n: int, slots: int) -> tuple[int, list[npt.NDArray[np.int32]]]:
    """Return M(n, slots), and [c][m]: the k of the recursion for c free slots and m steps, 0 for a tape."""
    if slots >= n - 1:
        return n, [np.zeros(n + 1, dtype=np.int32)] * (slots + 1)
    # Sums are below n², so 32 bits are enough for most chains, and twice as fast.
    dtype: type[np.signedinteger] = np.int32 if n < 30_000 else np.int64
    infinity = np.iinfo(dtype).max // 4
    fewer_slots = np.full(n + 1, infinity, dtype=dtype)  # M(·, c − 1)
    fewer_slots[1] = 1
    splits: list[npt.NDArray[np.int32]] = [np.zeros(n + 1, dtype=np.int32)]
    work = np.empty(n + 1, dtype=dtype)
    for c in range(1, slots + 1):
        steps = np.full(n + 1, infinity, dtype=dtype)
        left = np.full(n + 1, infinity, dtype=dtype)  # k + M(k, c)
        split = np.zeros(n + 1, dtype=np.int32)
        right = fewer_slots[::-1].copy()  # right[n − j] = M(j, c − 1), so that the loop reads contiguous memory
        # Up to c + 1 steps, every step but the last is taped.
        reach = min(n, c + 1)
        steps[1 : reach + 1] = np.arange(1, reach + 1)
        left[1 : reach + 1] = 2 * steps[1 : reach + 1]
        for m in range(reach + 1, n + 1):
            sums = np.add(left[1:m], right[n - m + 1 : n], out=work[: m - 1])
            k = int(sums.argmin())
            best = int(sums[k])
            tape = int(fewer_slots[m - 1]) + 1
            if best < tape:
                split[m] = k + 1
            else:
                best = tape
            steps[m] = best
            left[m] = best + m
        splits.append(split)
        fewer_slots = steps
    return int(fewer_slots[n]), splits


class Mixed(Schedule):
    """The schedule of `mixed`."""

    name = "mixed"
    n: int

    def __init__(self, n: int, slots: int) -> None:
        check_counts(n, slots)
        self.n = n
        self.slots = slots

    def __repr__(self) -> str:
        return f"mixed({self.n}, {self.slots})"

    def __iter__(self) -> Iterator[Action]:
        _, splits = self._plan
        held: list[tuple[int, bool]] = []  # the slots in use: step, True for a tape
        here, stop, free = 0, self.n, self.peak_slots.memory
        while True:
            # Reverse steps here … stop − 1 from the working state x_here. A slot with x_here counts as free.
            here_is_stored = bool(held) and held[-1] == (here, False)
            if here_is_stored:
                free += 1
            while stop - here > 1:
                k = int(splits[free][stop - here])
                if k:
                    if not here_is_stored:
                        yield Store(here)
                        held.append((here, False))
                    yield Advance(here, here + k)
                    here += k
                else:
                    if here_is_stored:
                        yield Free(here)
                        held.pop()
                    yield Store(here, content="tape")
                    held.append((here, True))
                    here += 1
                free -= 1
                here_is_stored = False
            if here_is_stored:
                yield Free(here)
                held.pop()
            yield Reverse(here)
            while held and held[-1][1]:
                here, _ = held.pop()
                yield Reverse(here, source="tape")
                yield Free(here, content="tape")
                free += 1
            if not held:
                return
            stop, here = here, held[-1][0]
            yield Load(here)

    @cached_property
    def _plan(self) -> tuple[int, list[npt.NDArray[np.int32]]]:
        return _plan(self.n, self.peak_slots.memory)

    @property
    def forward_steps(self) -> int:
        """M(n, c)."""
        return self._plan[0]

    @property
    def peak_slots(self) -> Tiers:
        """The given slots, at most n − 1."""
        return Tiers(memory=min(self.slots, self.n - 1))


def mixed(n: int, slots: int) -> Mixed:
    """Return the schedule with the fewest forward steps if a slot may hold a state or a tape.

    >>> print(mixed(1000, 10).explain())
    mixed: 1,000 steps reversed with 3,921 forward steps (3.92 × n), at most 10 slots in memory
    """
    return Mixed(n, slots)
