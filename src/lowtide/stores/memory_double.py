"""The test double: a store that copies values in memory, and fails where a test tells it to.

It behaves like a separate tier (each fetch returns new memory) without threads, files or chance, so
that tests of what uses stores can be exact. `calls` lists what was asked of it, in order; `refuse` makes puts
fall back; `damage` makes fetches raise. It saves no memory and is not for training.
"""

from __future__ import annotations

import dataclasses
import warnings

import torch

from .._errors import DamagedValueError, LowtideWarning
from ._base import Entry, StoreStats, Ticket
from .device import DeviceStore


class MemoryDouble(DeviceStore):
    """A store for tests.

    `refuse` has the names of values that cannot be written: they fall back, with one warning.

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
        self._hinted: set[int] = set()
        self._hits = self._fallbacks = 0

    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        """Store a copy of `tensor`."""
        ticket = super().put(tensor, name)
        self.calls.append(("put", name))
        if name in self._refuse:
            ticket._entry.fell_back = True
            self._fallbacks += 1
            if self._fallbacks == 1:
                warnings.warn(f"the memory double was told to refuse {name!r}", LowtideWarning, stacklevel=2)
        elif ticket._entry.tensor is not None:
            ticket._entry.hold(ticket._entry.tensor.clone())
        return ticket

    def fetch(self, ticket: Ticket) -> torch.Tensor:
        """A copy of the copy."""
        tensor = super().fetch(ticket)
        self.calls.append(("fetch", ticket.name))
        if id(ticket._entry) in self._damaged:
            raise DamagedValueError(f"{ticket._entry} is damaged, as the test wanted")
        if id(ticket._entry) in self._hinted:
            self._hinted.discard(id(ticket._entry))
            self._hits += 1
        return tensor if ticket.fell_back else tensor.clone()

    def is_resident(self, ticket: Ticket) -> bool:
        """Only what was refused: copies count as being elsewhere."""
        return self._live_entry(ticket).fell_back

    def prefetch(self, ticket: Ticket) -> None:
        """Note the hint."""
        super().prefetch(ticket)
        self.calls.append(("prefetch", ticket.name))
        self._hinted.add(id(ticket._entry))

    def drop(self, ticket: Ticket) -> None:
        """Forget the copy."""
        if not ticket._entry.dropped:
            self.calls.append(("drop", ticket.name))
        super().drop(ticket)

    def damage(self, ticket: Ticket) -> None:
        """Have every fetch of `ticket` raise from now on."""
        self._damaged.add(id(self._live_entry(ticket)))

    def _remove(self, entry: Entry) -> torch.Tensor | None:
        self._damaged.discard(id(entry))
        self._hinted.discard(id(entry))
        return super()._remove(entry)

    def stats(self) -> StoreStats:
        """What happened until now. Copies count as being elsewhere, not as resident."""
        with self._lock:
            kept = sum(entry.nbytes for entry in self._entries if entry.fell_back)
        return dataclasses.replace(
            super().stats(), resident_bytes=kept, prefetch_hits=self._hits, fallbacks=self._fallbacks
        )
