"""Retention: which recomputed values stay in memory after use.

A recomputed value is normally retained until its last use. A plan may name ops whose values are released instead.
A released value stays in memory only for replays that read it and for backward nodes that have unpacked it. It is
recomputed for its next use.
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
        """Return whether the value is released after use."""
        return value.origin is not None and value.origin.number in self.released_ops

    def handle_created(self, value: Value) -> None:
        """Count one more handle on the value."""
        self._handles[value] = self._handles.get(value, 0) + 1

    def handle_unpacked(self, value: Value) -> None:
        """Mark the value as in use by a backward node."""
        self.unpacked.add(value)

    def handle_freed(self, value: Value) -> None:
        """Count one handle less. Without handles the value is no longer in use, and is released."""
        left = self._handles.get(value, 1) - 1
        self._handles[value] = left
        if not left:
            self.unpacked.discard(value)
            if value.recipe is not None and self.is_released(value):
                value.release()
