"""What a plan has made more than once: which ops that is now, as backward goes on.

What such an op makes does not rest: it stays for the ops that wait for it, and for those that have asked for it. With
the asks that the plan names an op may turn: what it makes rests from then on, or does so no longer and is let go of.
An op that still has a turn to come keeps its recipe, whatever happens to what it makes.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable

from ..planning.turns import Turn
from .values import Value


class Turning:
    """The ops of one step whose results do not rest, or not always."""

    def __init__(self, again: Iterable[int], turns: Iterable[Turn]) -> None:
        self.again = set(again)
        """What these make does not rest now."""
        self._events: dict[tuple[int, int], list[int]] = {}
        self._left: Counter[int] = Counter()  # by op: turns to come
        for turn in turns:
            self._events.setdefault((turn.asked, turn.time), []).append(turn.op)
            self._left[turn.op] += 1
        self._heard: Counter[int] = Counter(dict.fromkeys((asked for asked, _ in self._events), 0))
        self.watched = frozenset({*self.again, *self._left, *self._heard})
        """The ops whose handles say when they are asked for."""
        # Of those: how many handles are left on a value, and which have been asked for by a node that still runs.
        self.handles: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self.asked: weakref.WeakSet[Value] = weakref.WeakSet()
        self._resting: dict[int, weakref.WeakSet[Value]] = {}

    def is_transient(self, value: Value) -> bool:
        """Whether it does not rest now."""
        return value.origin is not None and value.origin.number in self.again

    def stays_for_good(self, op: int) -> bool:
        """Whether what it makes now rests, and for as long as somebody wants it."""
        return op not in self.again and not self._left[op]

    def made(self, value: Value) -> None:
        """A replay has made it: it may have to be let go of at a turn."""
        if value.origin is not None and self._left[value.origin.number]:
            self._resting.setdefault(value.origin.number, weakref.WeakSet()).add(value)

    def hears(self, value: Value) -> None:
        """Backward is about to ask for a value."""
        op = value.origin.number if value.origin is not None else -1
        if op in self._heard:
            time = self._heard[op]
            self._heard[op] = time + 1
            for turning in self._events.get((op, time), ()):
                self._turn(turning)
        self.asked.add(value)

    def _turn(self, op: int) -> None:
        self._left[op] -= 1
        if op in self.again:
            self.again.remove(op)
            return
        self.again.add(op)
        for value in self._resting.pop(op, ()):
            if value.recipe is not None and value not in self.asked:
                value.let_go()

    def handed_out(self, value: Value) -> None:
        """Autograd has got a handle on a value."""
        self.handles[value] = self.handles.get(value, 0) + 1

    def handed_back(self, value: Value) -> None:
        """Autograd has let go of a handle. After the last it is no longer there for those that asked."""
        left = self.handles.get(value, 1) - 1
        self.handles[value] = left
        if not left:
            self.asked.discard(value)
            if value.recipe is not None and self.is_transient(value):
                value.let_go()
