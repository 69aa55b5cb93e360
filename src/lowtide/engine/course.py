"""The ways that forwards have gone, with what a rule that weighs time decided on each.

To ask such a rule, the engine adds up what a replay would run before an op, which costs more than noting the op.
Most forwards go the way of an earlier one: the same ops in the same places, making the same bytes. Once all times
on the way are settled, the answers cannot change any more, and are read from here.
"""

from __future__ import annotations

from collections import OrderedDict

from ..policies import Decision, Policy
from .effects import OpFacts
from .values import Place

_MOST_POLICIES = 16  # rules made anew each step must not grow the table for ever
_MOST_STEPS = 100_000  # nor shapes that never repeat

Passed = tuple[OpFacts, Place, int]
"""An op that ran, where, and the bytes that it made."""


class Step:
    """An op on the way, and all that is known to follow it."""

    __slots__ = ("decision", "recompute_us", "then", "times")

    def __init__(self, decision: Decision | None, recompute_us: float) -> None:
        self.decision = decision
        self.recompute_us = recompute_us
        self.then: dict[Passed, Step] = {}
        self.times = True  # whether an op that comes next may be one whose time is not settled


class Ways:
    """All ways that forwards under one rule have gone, as a tree from where they began."""

    def __init__(self) -> None:
        self.start = Step(None, 0.0)
        self._steps = 0

    def add(self, last: Step, passed: Passed, decision: Decision, recompute_us: float) -> Step | None:
        """The step after `last` where this op ran and this was decided; None where the tree is full."""
        if self._steps >= _MOST_STEPS:
            return None
        self._steps += 1
        step = last.then[passed] = Step(decision, recompute_us)
        last.times = False
        return step


_ways: OrderedDict[Policy, Ways] = OrderedDict()


def ways_of(policy: Policy) -> Ways | None:
    """What is known of a rule's ways, for the process; None for a rule that has to be asked every time."""
    if not (policy.steady and policy.needs_cost) or policy.layers is not None:  # modules would be held here for ever
        return None
    try:
        known = _ways.pop(policy, None) or Ways()
    except TypeError:  # a user's rule without a hash
        return None
    _ways[policy] = known  # used last
    while len(_ways) > _MOST_POLICIES:
        _ways.popitem(last=False)
    return known
