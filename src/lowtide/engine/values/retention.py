"""Which recomputed values stay in memory after use.

A recomputed value is normally retained until its last use. A plan may name ops whose values are released instead:
such a value stays for the replays that wait for it and for the backward nodes that have unpacked it, and is recomputed
when it is needed next.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from .value import Value


class Retention:
    """The released ops of one planned step, and which of their values a backward node is using."""

    def __init__(self, released_ops: Iterable[int]) -> None:
        self.released_ops = frozenset(released_ops)
        self._handles: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self.unpacked: weakref.WeakSet[Value] = weakref.WeakSet()
        """Values that a backward node has unpacked and that still have a handle."""

    def is_released(self, value: Value) -> bool:
        """Whether the value is released after use."""
        return value.origin is not None and value.origin.number in self.released_ops

    def handle_created(self, value: Value) -> None:
        """Autograd has saved the value once more."""
        self._handles[value] = self._handles.get(value, 0) + 1

    def handle_unpacked(self, value: Value) -> None:
        """A backward node unpacks the value."""
        self.unpacked.add(value)

    def handle_freed(self, value: Value) -> None:
        """Autograd has freed a handle. With the last one the value is no longer in use, and is released."""
        left = self._handles.get(value, 1) - 1
        self._handles[value] = left
        if not left:
            self.unpacked.discard(value)
            if value.recipe is not None and self.is_released(value):
                value.release()
