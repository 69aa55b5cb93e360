"""The binomial schedule: the fewest forward steps for a given number of slots.

Paper: A. Griewank and A. Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).

Guarantee: with c slots (the initial state takes one) and r the least number with C(c+r, c) ≥ n, exactly
(r+1)·n − C(c+r, r−1) forward steps, and no schedule that stores states takes fewer. Where to put the next
checkpoint is a closed formula, so the schedule is streamed: beyond the list of occupied slots nothing is
held, however long the chain.

Shortfall: every step is taken to cost the same and every state to be of one size (`heterogeneous` does
not), and what a slot holds is a state (in `mixed` it may be a tape, which takes fewer steps).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

from ..._errors import ArgumentError
from ._actions import Action, Advance, Free, Load, Reverse, Schedule, Store, Tiers


def check_counts(n: int, slots: int) -> None:
    """Refuse a chain without steps, and slots that cannot do."""
    if n < 1:
        raise ArgumentError(f"a chain has at least one step, not {n}")
    if slots < 0 or (slots == 0 and n > 1):
        raise ArgumentError(f"reversing {n} steps needs at least one slot (the initial state takes it), not {slots}")


def repetitions(length: int, slots: int) -> int:
    """The least r with C(slots + r, slots) ≥ length: how often the busiest step is run again."""
    if slots == 1:
        return length - 1
    r, reach = 0, 1
    while reach < length:
        r += 1
        reach = reach * (slots + r) // r
    return r


def binomial_steps(length: int, slots: int) -> int:
    """Forward steps of the optimum, from x_0 as the working state, the taped ones included."""
    if length <= 1:
        return length
    r = repetitions(length, slots)
    return (r + 1) * length - comb(slots + r, r - 1)


def binomial_split(length: int, slots: int) -> int:
    """How far to advance from a checkpoint before the next one, with `slots` free, its own included.

    The optimal distances are an interval; this is its far end, which takes the fewest writes.
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
    """Reverse the steps `start` … `stop - 1` optimally, from the working state x_start.

    `slots` are those that may be used, and include the one in which x_start is, where it is `stored`. All
    of them are empty afterwards.
    """
    held = [start] if stored else []
    here = start
    while True:
        while stop - here > 1:
            if not held or held[-1] != here:
                yield Store(here)
                held.append(here)
            free = slots - len(held) + 1
            # With a slot for each state that remains, every state is stored.
            there = here + (1 if stop - here <= free + 1 else binomial_split(stop - here, free))
            yield Advance(here, there)
            here = there
        if held and held[-1] == here:
            yield Free(held.pop())
        yield Reverse(here)
        if not held:
            return
        stop, here = here, held[-1]
        yield Load(here)


class Revolve(Schedule):
    """What `revolve` returns."""

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
        """All of them, unless the chain is shorter."""
        return Tiers(memory=min(self.slots, self.n - 1))


def revolve(n: int, slots: int) -> Revolve:
    """The schedule with the fewest forward steps for `n` equal steps and `slots` equal states.

    >>> print(revolve(1000, 10).explain())
    revolve: 1,000 steps reversed with 4,636 forward steps (4.64 × n), at most 10 slots in memory
    """
    return Revolve(n, slots)
