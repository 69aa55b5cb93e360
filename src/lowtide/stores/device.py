"""Device tier: values stay in place. No copy is made and no memory is saved.

`fetch` returns the tensor that was put, detached.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from ._base import Entry, Store, StoreStats, Ticket, removed_error
from ._geometry import geometry_of


class DeviceStore(Store):
    """Store that keeps every value in memory."""

    tier = "device"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: set[Entry] = set()
        self._collected: deque[Entry] = deque()
        self._put_bytes = self._fetched_bytes = self._stored_bytes = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        """Keep a reference to `tensor`."""
        self._check_open()
        # Detached: the autograd graph may reference the ticket, and that cycle would never be freed.
        entry = Entry(name, geometry_of(tensor), tensor.detach() if tensor.requires_grad else tensor)
        with self._lock:
            self._drop_collected()
            self._entries.add(entry)
            self._put_bytes += entry.nbytes
            self._stored_bytes += entry.nbytes
        return Ticket(self, entry)

    def fetch(self, ticket: Ticket) -> torch.Tensor:
        """Return the tensor that was put, detached."""
        entry = self._live_entry(ticket)
        with self._lock:
            tensor = entry.tensor
            if tensor is None:
                raise removed_error(entry)
            self._fetched_bytes += entry.nbytes
        damage = entry.find_damage(tensor)
        if damage is not None:
            raise entry.damaged_error(damage)
        return tensor

    def drop(self, ticket: Ticket) -> None:
        """Release the tensor."""
        entry = self._owned_entry(ticket)
        with self._lock:
            self._drop_collected()
            freed = self._remove(entry)
        del freed  # outside the lock

    def stats(self) -> StoreStats:
        """Return statistics."""
        with self._lock:
            self._drop_collected()
            return StoreStats(
                tier=self.tier,
                values=len(self._entries),
                stored_bytes=self._stored_bytes,
                resident_bytes=self._stored_bytes,
                put_bytes=self._put_bytes,
                fetched_bytes=self._fetched_bytes,
            )

    def close(self) -> None:
        """Release all tensors."""
        with self._lock:
            self._closed = True
            freed = [self._remove(entry) for entry in list(self._entries)]
        del freed

    def _ticket_collected(self, entry: Entry) -> None:
        entry.tensor = None  # free the memory now; the counts follow under the lock
        self._collected.append(entry)

    def _drop_collected(self) -> None:
        while self._collected:
            self._remove(self._collected.popleft())

    def _remove(self, entry: Entry) -> torch.Tensor | None:
        """Remove `entry`. Return its tensor, which the caller frees outside the lock."""
        tensor, entry.tensor = entry.tensor, None
        if not entry.dropped:
            entry.dropped = True
            self._entries.discard(entry)
            self._stored_bytes -= entry.nbytes
        return tensor
