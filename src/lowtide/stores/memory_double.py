"""Test double: a deterministic store that copies values in memory and fails on request.

Each fetch returns new memory, as with a separate tier, but there are no threads or files. `calls` lists the
calls in order, `refuse` makes puts fall back, and `damage` makes fetches raise. It saves no memory and is not
for training.
"""

from __future__ import annotations

import dataclasses
import warnings

import torch

from .._errors import DamagedValueError, LowtideWarning
from ._base import Entry, StoreStats, Ticket
from .device import DeviceStore


class MemoryDouble(DeviceStore):
    """Store for tests.

    Values with a name in `refuse` fall back to memory, with one warning.

    >>> import torch
    >>> from lowtide.stores import MemoryDouble
    >>> store = MemoryDouble()
    >>> ticket = store.put(torch.ones(2), "mask")
    >>> _ = store.fetch(ticket)
    >>> store.drop(ticket)
    >>> store.calls
    [('put', 'mask'), ('fetch', 'mask'), ('drop', 'mask')]
    """

    tier = "memory double"

    def __init__(self, *, refuse: frozenset[str] | set[str] = frozenset()) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self._refuse = frozenset(refuse)
        self._damaged: set[int] = set()
        self._prefetched: set[int] = set()
        self._hits = self._fallbacks = 0

    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        """Store a copy of `tensor`."""
        ticket = super().put(tensor, name)
        self.calls.append(("put", name))
        if name in self._refuse:
            ticket.entry.fell_back = True
            self._fallbacks += 1
            if self._fallbacks == 1:
                warnings.warn(
                    f"the memory double refuses {name!r}, as the test requested", LowtideWarning, stacklevel=2
                )
        elif ticket.entry.tensor is not None:
            ticket.entry.hold(ticket.entry.tensor.clone())
        return ticket

    def fetch(self, ticket: Ticket) -> torch.Tensor:
        """Return a copy of the stored copy."""
        tensor = super().fetch(ticket)
        self.calls.append(("fetch", ticket.name))
        if id(ticket.entry) in self._damaged:
            raise DamagedValueError(f"{ticket.entry} is damaged, as the test requested")
        if id(ticket.entry) in self._prefetched:
            self._prefetched.discard(id(ticket.entry))
            self._hits += 1
        return tensor if ticket.fell_back else tensor.clone()

    def is_resident(self, ticket: Ticket) -> bool:
        """Return whether the value was refused. Copies count as not resident."""
        return self._live_entry(ticket).fell_back

    def prefetch(self, ticket: Ticket) -> None:
        """Record the call."""
        super().prefetch(ticket)
        self.calls.append(("prefetch", ticket.name))
        self._prefetched.add(id(ticket.entry))

    def drop(self, ticket: Ticket) -> None:
        """Delete the copy."""
        if not ticket.entry.dropped:
            self.calls.append(("drop", ticket.name))
        super().drop(ticket)

    def damage(self, ticket: Ticket) -> None:
        """Make every later fetch of `ticket` raise."""
        self._damaged.add(id(self._live_entry(ticket)))

    def _remove(self, entry: Entry) -> torch.Tensor | None:
        self._damaged.discard(id(entry))
        self._prefetched.discard(id(entry))
        return super()._remove(entry)

    def stats(self) -> StoreStats:
        """Return statistics. Copies count as not resident."""
        with self._lock:
            fallback_bytes = sum(entry.nbytes for entry in self._entries if entry.fell_back)
        return dataclasses.replace(
            super().stats(), resident_bytes=fallback_bytes, prefetch_hits=self._hits, fallbacks=self._fallbacks
        )
