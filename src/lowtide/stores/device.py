"""The device tier: a value stays where it is.

It costs nothing and saves nothing; it is what `keep` means when every value goes through a store. `fetch`
gives the tensor that was put, without its history. No copy is made, ever.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from .._errors import StoreError
from ._base import Entry, Store, StoreStats, Ticket
from ._geometry import geometry_of


class DeviceStore(Store):
    """Just holds what it is given."""

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
        """Hold `tensor`."""
        self._check_open()
        # With its history it could hold whoever holds the ticket, and would never be freed.
        entry = Entry(name, geometry_of(tensor), tensor.detach() if tensor.requires_grad else tensor)
        with self._lock:
            self._drop_collected()
            self._entries.add(entry)
            self._put_bytes += entry.nbytes
            self._stored_bytes += entry.nbytes
        return Ticket(self, entry)

    def fetch(self, ticket: Ticket) -> torch.Tensor:
        """The tensor itself."""
        entry = self._live_entry(ticket)
        with self._lock:
            tensor = entry.tensor
            if tensor is None:
                raise StoreError(f"{entry} was dropped, or its store closed, by another thread while it was fetched")
            self._fetched_bytes += entry.nbytes
        damage = entry.find_damage(tensor)
        if damage is not None:
            raise entry.damaged_error(damage)
        return tensor

    def drop(self, ticket: Ticket) -> None:
        """Let go of the tensor."""
        entry = self._owned_entry(ticket)
        with self._lock:
            self._drop_collected()
            freed = self._remove(entry)
        del freed  # without the lock

    def stats(self) -> StoreStats:
        """What happened until now."""
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
        """Let go of everything."""
        with self._lock:
            self._closed = True
            freed = [self._remove(entry) for entry in list(self._entries)]
        del freed

    def _ticket_collected(self, entry: Entry) -> None:
        entry.tensor = None  # at once; the counts follow when somebody has the lock
        self._collected.append(entry)

    def _drop_collected(self) -> None:
        while self._collected:
            self._remove(self._collected.popleft())

    def _remove(self, entry: Entry) -> torch.Tensor | None:
        """Forget `entry`; its tensor, to be freed without the lock."""
        tensor, entry.tensor = entry.tensor, None
        if not entry.dropped:
            entry.dropped = True
            self._entries.discard(entry)
            self._stored_bytes -= entry.nbytes
        return tensor
