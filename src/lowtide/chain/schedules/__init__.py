"""Schedules that reverse a chain of n steps in little memory, and their validator.

    revolve(n, slots)                          fewest forward steps
    mixed(n, slots)                            fewest forward steps if a slot may hold a tape instead of a state
    multistage(n, memory_slots, disk_slots, write_cost, read_cost)    least cost over two tiers
    heterogeneous(costs, sizes, budget_bytes)  least cost for unequal steps and states, within a byte budget
    online(slots)                              few forward steps for unknown n
    periodic(n, period)  sqrt(n)  keep_all(n)  simple schedules, for comparison

A schedule is an iterable of the actions `Advance`, `Store`, `Load`, `Free` and `Reverse`. `forward_steps`,
`peak_slots` and `explain()` are known before it runs. `validate` checks any sequence of actions.
"""

from ._actions import Action, Advance, Explanation, Free, Load, Reverse, Schedule, Store, Tiers
from ._heterogeneous import heterogeneous
from ._mixed import mixed
from ._multistage import multistage
from ._online import Online, online
from ._periodic import keep_all, periodic, sqrt
from ._revolve import revolve
from ._validator import Counts, validate

__all__ = [
    "Action",
    "Advance",
    "Counts",
    "Explanation",
    "Free",
    "Load",
    "Online",
    "Reverse",
    "Schedule",
    "Store",
    "Tiers",
    "heterogeneous",
    "keep_all",
    "mixed",
    "multistage",
    "online",
    "periodic",
    "revolve",
    "sqrt",
    "validate",
]
