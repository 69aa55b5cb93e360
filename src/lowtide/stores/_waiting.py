"""What threads that share a lock need beside it: a place for what is freed after it, and bells for those who wait."""

from __future__ import annotations

import threading


class Trash:
    """What is freed after the lock: `with trash, lock:`, since only a lock's own `with` is safe from interrupts."""

    def __init__(self) -> None:
        self._things: list[object] = []

    def throw(self, *things: object) -> None:
        """Have these freed later."""
        self._things.extend(things)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _things, self._things = self._things, []


class Bells:
    """Locks that can be taken when something has changed, one for each who waits. Used with the shared lock held."""

    def __init__(self) -> None:
        self._bells: list[threading.Lock] = []

    def __len__(self) -> int:
        return len(self._bells)

    def new(self) -> threading.Lock:
        """A lock that can be taken when something has changed."""
        bell = threading.Lock()
        bell.acquire()
        self._bells.append(bell)
        return bell

    def ring(self) -> None:
        """Something has changed."""
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.release()
