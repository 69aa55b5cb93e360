"""What every store promises: a value goes in, a ticket comes out, and the ticket gives the same value back.

Guaranteed by every tier: `fetch` gives the bits, dtype, shape, strides and device that were put, or raises;
a value is stored until its ticket is dropped, or nobody holds the ticket any more, or the store is closed.
A fetch ends nothing: whoever lets go of a fetched tensor and keeps the ticket has evicted the value a second time,
at no cost, and may fetch again. A store knows tensors and bytes; what to put, and when, is for others.

What is put must not be changed afterwards, and neither must what is fetched: while a value is still in memory
both are the same memory. Where a value that is still in memory was changed in place by torch, `fetch` raises.

While a store makes or frees a tensor it holds no lock, or one that lets the same thread in again: a dispatch mode
that sees the one, or a weak reference that is told of the other, may use the store (but what is told of in one of
the store's own threads cannot wait there, and gets an error). A finalizer that the garbage collector may run
anywhere lets go of its ticket and calls nothing.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

import torch

from .._errors import ArgumentError, DamagedValueError, StoreError
from ._geometry import Geometry

if TYPE_CHECKING:
    from typing_extensions import Self  # Python 3.10 has none of its own; torch brings it


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store has done and what it holds, at one moment."""

    tier: str
    values: int
    """Values stored now."""
    stored_bytes: int
    """Bytes of the values stored now, wherever they are."""
    resident_bytes: int
    """Bytes of memory that the store holds now: not yet written, read ahead, or kept because a write failed."""
    put_bytes: int
    fetched_bytes: int
    in_flight_bytes: int = 0
    """Bytes put and not yet written."""
    peak_in_flight_bytes: int = 0
    prefetched_bytes: int = 0
    """Bytes read ahead (or being read) and not yet fetched."""
    peak_prefetched_bytes: int = 0
    prefetch_hits: int = 0
    """Fetches that found their value read, or being read, because of `prefetch`."""
    put_wait_seconds: float = 0.0
    """How long `put` was held up because too much was in flight."""
    fetch_wait_seconds: float = 0.0
    """How long `fetch` took to read, or waited for a read to end."""
    fallbacks: int = 0
    """Values, of all ever put, that stayed in memory because a write failed."""
    file_bytes: int = 0
    """The length of the spill file, holes included."""


class Entry:
    """What a store knows about one value. Held by its ticket."""

    __slots__ = ("dropped", "fell_back", "geometry", "name", "tensor", "version")

    def __init__(self, name: str, geometry: Geometry, tensor: torch.Tensor | None = None) -> None:
        self.name = name
        self.geometry = geometry
        self.dropped = False
        self.fell_back = False
        self.tensor: torch.Tensor | None = None
        self.version: int | None = None
        if tensor is not None:
            self.hold(tensor)

    @property
    def nbytes(self) -> int:
        """How many bytes the value has."""
        return self.geometry.nbytes

    def hold(self, tensor: torch.Tensor) -> None:
        """Have the value in memory, as it is now."""
        self.tensor = tensor
        self.version = _version(tensor)

    def find_damage(self, tensor: torch.Tensor) -> str | None:
        """What was done to `tensor`, the value in memory, since it was put; None if nothing was."""
        if self.nbytes and tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize:  # counted from null
            return "its memory was given back after it was put, by resizing its storage"
        if _version(tensor) != self.version:
            return "it was changed in place after it was put, while it was still in memory"
        return None

    def damaged_error(self, damage: str) -> DamagedValueError:
        """The error for a value in memory that is no longer what was put."""
        return DamagedValueError(f"{self} is damaged: {damage}. Put a copy of what will be changed, or put it later")

    def __str__(self) -> str:
        return f"{self.name!r} ({self.geometry})" if self.name else f"a value ({self.geometry})"


def _version(tensor: torch.Tensor) -> int | None:
    """How often torch has changed it in place, where torch counts that."""
    return None if tensor.is_inference() else tensor._version


class Ticket:
    """The right to one stored value. When nobody holds it any more, the value is dropped."""

    __slots__ = ("__weakref__", "_entry", "_store")

    def __init__(self, store: Store, entry: Entry) -> None:
        self._store = store
        self._entry = entry

    @property
    def name(self) -> str:
        """The name that was given to `put`."""
        return self._entry.name

    @property
    def nbytes(self) -> int:
        """How many bytes the value has."""
        return self._entry.nbytes

    @property
    def fell_back(self) -> bool:
        """Whether the value stays in memory because it could not be written."""
        return self._entry.fell_back

    def __repr__(self) -> str:
        state = ", dropped" if self._entry.dropped else ", fell back to memory" if self.fell_back else ""
        return f"<Ticket for {self._entry} in the {self._store.tier} store{state}>"

    def __del__(self) -> None:
        # Half made, or the interpreter is going: then there is nothing to give back.
        with contextlib.suppress(AttributeError, TypeError):
            if not self._entry.dropped:
                self._store._ticket_collected(self._entry)


class Store(ABC):
    """Where values wait. Every method may be called from any thread."""

    tier: ClassVar[str]

    @abstractmethod
    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        """Store `tensor`, which must not be changed from now on. `name` is for messages."""

    @abstractmethod
    def fetch(self, ticket: Ticket) -> torch.Tensor:
        """The value, without history, waiting for it where needed. It stays stored until it is dropped."""

    def is_resident(self, ticket: Ticket) -> bool:
        """Whether `fetch` would give the value at once, from memory. Never waits for a disk or a device.

        Of this moment: a value that was put goes when it has been written.
        """
        return self._live_entry(ticket).tensor is not None

    def bytes_to_fetch(self, ticket: Ticket) -> int:
        """How much memory, on the value's device, `fetch` would newly take for it now; 0 where it is resident."""
        return 0 if self.is_resident(ticket) else ticket.nbytes

    def prefetch(self, ticket: Ticket) -> None:
        """Say that `ticket` will be fetched soon, in the order of these calls. Returns at once.

        A hint: a tier that gains nothing by it only checks the ticket.
        """
        self._live_entry(ticket)

    @property
    def max_prefetch_bytes(self) -> int:
        """The most that `prefetch` has in memory before it is fetched; 0 for a tier that gains nothing by it."""
        return 0

    def drain(self, nbytes: int) -> int:
        """Wait until `nbytes` of what was put and is still in memory have left it; how many bytes did.

        Fewer if nothing is on its way any more, as with a tier where nothing ever is. A value that cannot be
        written (`ticket.fell_back`) does not leave. Memory that others hold too is theirs to let go.
        """
        self._check_open()
        return 0

    @abstractmethod
    def drop(self, ticket: Ticket) -> None:
        """Forget the value. Once is enough; a second time, or after `close`, does nothing."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """What happened until now. Also after `close`."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; all tickets are void. A second time does nothing."""

    @abstractmethod
    def _ticket_collected(self, entry: Entry) -> None:
        """The ticket is gone. Called by the garbage collector, anywhere: takes no lock that others hold."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether `close` was called."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise StoreError(f"this {self.tier} store is closed, and what it held is gone: make a new one")

    def _owned_entry(self, ticket: Ticket) -> Entry:
        """What is behind `ticket`, if it is one of this store's."""
        if ticket._store is not self:
            raise ArgumentError(f"{ticket!r} belongs to another store: fetch and drop it there")
        return ticket._entry

    def _live_entry(self, ticket: Ticket) -> Entry:
        """What is behind `ticket`, if it can still be fetched."""
        entry = self._owned_entry(ticket)
        self._check_open()
        if entry.dropped:
            raise ArgumentError(f"{entry} was dropped from the {self.tier} store: fetch before dropping")
        return entry
