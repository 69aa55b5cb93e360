"""The binomial schedule: the fewest forward steps for a given number of slots.

Paper: A. Griewank and A. Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).

Guarantee: for c slots, of which the initial state takes one, let r be the smallest number with
C(c+r, c) ≥ n. The schedule takes (r+1)·n − C(c+r, r−1) forward steps, and no schedule that stores states takes
fewer. A closed formula gives the next checkpoint, so the schedule is streamed and holds only the list of
occupied slots.

Limits: all steps cost the same and all states have the same size; `heterogeneous` allows others. Slots hold
states; `mixed` also stores tapes, which takes fewer steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

from ..._errors import ArgumentError
from ._actions import Action, Advance, Free, Load, Reverse, Schedule, Store, Tiers


def check_counts(n: int, slots: int) -> None:
    """Raise `ArgumentError` for a chain without steps, or for too few slots."""
    if n < 1:
        raise ArgumentError(f"a chain has at least one step, not {n}")
    if slots < 0 or (slots == 0 and n > 1):
        raise ArgumentError(f"reversing {n} steps needs at least one slot (the initial state takes it), not {slots}")


def repetitions(length: int, slots: int) -> int:
    """Return the smallest r with C(slots + r, slots) ≥ length: the maximum number of reruns of one step."""
    if slots == 1:
        return length - 1
    r, reach = 0, 1
    while reach < length:
        r += 1
        reach = reach * (slots + r) // r
    return r


def binomial_steps(length: int, slots: int) -> int:
    """Return the minimal number of forward steps from the working state x_0, including taped steps."""
    if length <= 1:
        return length
    r = repetitions(length, slots)
    return (r + 1) * length - comb(slots + r, r - 1)


def binomial_split(length: int, slots: int) -> int:
    """Return the distance to the next checkpoint. `slots` includes the slot of the current one.

    The optimal distances form an interval. The largest one takes the fewest writes.
    """
    if slots == 1:
        return length - 1
    # With reach = C(slots+r, slots) ≥ length: C(slots+r−1, slots) bounds the left part from above, and
    # C(slots+r−2, slots−1) the right part from below.
    r, reach, before = 0, 1, 0
    while reach < length:
        r += 1
        before, reach = reach, reach * (slots + r) // r
    right = before * slots // (slots + r - 1)
    return min(before, length - right)


def reverse_segment(start: int, stop: int, slots: int, *, stored: bool = False) -> Iterator[Action]:
    """Yield the actions that reverse steps `start` … `stop - 1` optimally from the working state x_start.

    `slots` is the number of slots to use. If x_start is already `stored`, its slot is one of them. All of
    them are free at the end.
    """
    held = [start] if stored else []
    here = start
    while True:
        while stop - here > 1:
            if not held or held[-1] != here:
                yield Store(here)
                held.append(here)
            free = slots - len(held) + 1
            # With a slot for every remaining state, store every state.
            next_checkpoint = here + (1 if stop - here <= free + 1 else binomial_split(stop - here, free))
            yield Advance(here, next_checkpoint)
            here = next_checkpoint
        if held and held[-1] == here:
            yield Free(held.pop())
        yield Reverse(here)
        if not held:
            return
        stop, here = here, held[-1]
        yield Load(here)


class Revolve(Schedule):
    """The schedule of `revolve`."""

    name = "revolve"
    n: int

    def __init__(self, n: int, slots: int) -> None:
        check_counts(n, slots)
        self.n = n
        self.slots = slots

    def __iter__(self) -> Iterator[Action]:
        return reverse_segment(0, self.n, self.slots)

    def __repr__(self) -> str:
        return f"revolve({self.n}, {self.slots})"

    @property
    def forward_steps(self) -> int:
        """(r+1)·n − C(c+r, r−1)."""
        return binomial_steps(self.n, self.slots)

    @property
    def peak_slots(self) -> Tiers:
        """The given slots, at most n − 1."""
        return Tiers(memory=min(self.slots, self.n - 1))


def revolve(n: int, slots: int) -> Revolve:
    """Return the schedule with the fewest forward steps for `n` equal steps and `slots` equal states.

    >>> print(revolve(1000, 10).explain())
    revolve: 1,000 steps reversed with 4,636 forward steps (4.64 × n), at most 10 slots in memory
    """
    return Revolve(n, slots)
