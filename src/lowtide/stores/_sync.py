"""Helpers for threads that share one lock: deferred frees and a list of waiting threads."""

from __future__ import annotations

import threading


class DeferredFrees:
    """Frees objects after the lock is released: `with deferred, lock:`.

    This is a separate context manager because only the `with` statement of a lock is safe from interrupts.
    """

    def __init__(self) -> None:
        self._objects: list[object] = []

    def add(self, *objects: object) -> None:
        """Free `objects` when the context ends."""
        self._objects.extend(objects)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _objects, self._objects = self._objects, []


class Waiters:
    """One lock for each waiting thread. All methods are called with the shared lock held."""

    def __init__(self) -> None:
        self._locks: list[threading.Lock] = []

    def __len__(self) -> int:
        return len(self._locks)

    def register(self) -> threading.Lock:
        """Return a lock that `notify_all` releases."""
        lock = threading.Lock()
        lock.acquire()
        self._locks.append(lock)
        return lock

    def notify_all(self) -> None:
        """Release every registered lock."""
        locks, self._locks = self._locks, []
        for lock in locks:
            lock.release()
