"""Orders in which to reverse a chain of n steps with little memory, and the machine that judges them.

    revolve(n, slots)                         the fewest forward steps
    mixed(n, slots)                           … where a slot may hold a tape instead of a state
    multistage(n, memory_slots, disk_slots, write_cost, read_cost)      … over two tiers
    heterogeneous(costs, sizes, budget_bytes) … for unequal steps and states, within bytes
    online(slots)                             … when n is not known beforehand
    periodic(n, period)  sqrt(n)  keep_all(n) simple ones, to compare with

Each is an iterable of the actions `Advance`, `Store`, `Load`, `Free` and `Reverse`, and says beforehand what
it will do: `forward_steps`, `peak_slots`, `explain()`. `validate` replays any sequence of actions.
"""

from ._actions import Action, Advance, Explanation, Free, Load, Reverse, Schedule, Store, Tiers
from ._heterogeneous import heterogeneous
from ._machine import Counts, validate
from ._mixed import mixed
from ._multistage import multistage
from ._online import Online, online
from ._revolve import revolve
from ._simple import keep_all, periodic, sqrt

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
