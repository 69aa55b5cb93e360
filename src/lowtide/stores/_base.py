"""Base class of stores, tickets and statistics.

`put` takes a tensor and returns a ticket. `fetch` returns a tensor with the same bits, dtype, shape, strides
and device, or raises. A value is stored until its ticket is dropped or garbage-collected, or the store is
closed. A fetch does not end the storage: a caller that keeps the ticket can free the fetched tensor and fetch
again, without another write.

A tensor must not be changed after `put`, nor after `fetch`: while a value is still in memory, both share its
memory. `fetch` raises if torch has changed such a value in place.

Stores are reentrant. Dispatch modes and weak-reference callbacks may use a store while the store allocates or
frees a tensor, so a store then holds no lock, or a reentrant one. A callback that runs in a background thread
of the store must not wait for the store; it gets an error. A finalizer that may run during garbage collection
must not call the store; it only releases its ticket.
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
    from typing_extensions import Self  # not in typing before Python 3.11; a dependency of torch


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Statistics of a store at one moment."""

    tier: str
    values: int
    """Values stored now."""
    stored_bytes: int
    """Bytes of the values stored now, in memory or not."""
    resident_bytes: int
    """Bytes of memory held by the store now: not yet written, prefetched, or in memory after a failed write."""
    put_bytes: int
    """Bytes of all values ever put."""
    fetched_bytes: int
    """Bytes of all fetches."""
    in_flight_bytes: int = 0
    """Bytes put and not yet written."""
    peak_in_flight_bytes: int = 0
    prefetched_bytes: int = 0
    """Bytes prefetched, or being prefetched, and not yet fetched."""
    peak_prefetched_bytes: int = 0
    prefetch_hits: int = 0
    """Fetches whose value was prefetched or being prefetched."""
    put_wait_seconds: float = 0.0
    """Time that `put` waited because too many bytes were in flight."""
    fetch_wait_seconds: float = 0.0
    """Time that `fetch` read or waited for a read."""
    fallbacks: int = 0
    """Values, of all ever put, that stayed in memory because a write failed."""
    file_bytes: int = 0
    """Length of the spill file, including holes."""


class Entry:
    """State of one stored value. Referenced by its ticket."""

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
        """Size of the value in bytes."""
        return self.geometry.nbytes

    def hold(self, tensor: torch.Tensor) -> None:
        """Reference the value in memory and remember its version."""
        self.tensor = tensor
        self.version = _version(tensor)

    def find_damage(self, tensor: torch.Tensor) -> str | None:
        """Return how `tensor`, the value in memory, was changed since `put`, or None if it was not."""
        # With a freed storage, data_ptr is the offset from a null pointer.
        if self.nbytes and tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize:
            return "its memory was freed after it was put, by resizing its storage"
        if _version(tensor) != self.version:
            return "it was changed in place after it was put, while it was still in memory"
        return None

    def damaged_error(self, damage: str) -> DamagedValueError:
        """Return the error for a value that was changed while in memory."""
        return DamagedValueError(f"{self} is damaged: {damage}. Put a copy, or put the tensor after the change")

    def __str__(self) -> str:
        return f"{self.name!r} ({self.geometry})" if self.name else f"a value ({self.geometry})"


def _version(tensor: torch.Tensor) -> int | None:
    """Return torch's count of in-place changes, or None for inference tensors, which have no count."""
    return None if tensor.is_inference() else tensor._version


class Ticket:
    """Reference to one stored value. The value is dropped when the ticket is garbage-collected."""

    __slots__ = ("__weakref__", "entry", "store")

    def __init__(self, store: Store, entry: Entry) -> None:
        self.store = store
        self.entry = entry

    @property
    def name(self) -> str:
        """Name that was given to `put`."""
        return self.entry.name

    @property
    def nbytes(self) -> int:
        """Size of the value in bytes."""
        return self.entry.nbytes

    @property
    def fell_back(self) -> bool:
        """Whether the value stays in memory because its write failed."""
        return self.entry.fell_back

    def __repr__(self) -> str:
        state = ", dropped" if self.entry.dropped else ", fell back to memory" if self.fell_back else ""
        return f"<Ticket for {self.entry} in the {self.store.tier} store{state}>"

    def __del__(self) -> None:
        # Attributes may be missing after a failed __init__ or while the interpreter shuts down.
        with contextlib.suppress(AttributeError, TypeError):
            if not self.entry.dropped:
                self.store._ticket_collected(self.entry)


class Store(ABC):
    """Base class of all stores. Every method is thread-safe."""

    tier: ClassVar[str]

    @abstractmethod
    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        """Store `tensor`, which must not be changed afterwards. `name` appears in messages."""

    @abstractmethod
    def fetch(self, ticket: Ticket) -> torch.Tensor:
        """Return the value, detached. Waits for a read if needed. The value stays stored until it is dropped."""

    def is_resident(self, ticket: Ticket) -> bool:
        """Return whether `fetch` would return the value from memory, without waiting.

        The result holds only for now: a value that was put leaves memory once it is written.
        """
        return self._live_entry(ticket).tensor is not None

    def bytes_to_fetch(self, ticket: Ticket) -> int:
        """Return the bytes that `fetch` would allocate now on the device of the value. 0 if it is resident."""
        return 0 if self.is_resident(ticket) else ticket.nbytes

    def prefetch(self, ticket: Ticket) -> None:
        """Announce a fetch of `ticket`, in the order of these calls. Returns immediately.

        This is a hint. A tier without prefetching only checks the ticket.
        """
        self._live_entry(ticket)

    @property
    def max_prefetch_bytes(self) -> int:
        """Upper limit on bytes prefetched and not yet fetched. 0 for a tier without prefetching."""
        return 0

    def drain(self, nbytes: int) -> int:
        """Wait until `nbytes` of the values in flight have left memory. Return the bytes that left.

        Fewer bytes leave if no more are in flight; some tiers never have any. A value that cannot be written
        (`ticket.fell_back`) does not leave. Memory that the caller references too is not freed.
        """
        self._check_open()
        return 0

    @abstractmethod
    def drop(self, ticket: Ticket) -> None:
        """Delete the value. A second call, or a call after `close`, has no effect."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return statistics. Works after `close`, too."""

    @abstractmethod
    def close(self) -> None:
        """Delete all values and free all resources. A second call has no effect."""

    @abstractmethod
    def _ticket_collected(self, entry: Entry) -> None:
        """Drop `entry`. Called by the garbage collector in any thread, so it must not wait for a lock."""

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
            raise StoreError(f"this {self.tier} store is closed and its values are deleted: create a new store")

    def _owned_entry(self, ticket: Ticket) -> Entry:
        """Return the entry of `ticket`, or raise if the ticket belongs to another store."""
        if ticket.store is not self:
            raise ArgumentError(f"{ticket!r} belongs to another store: fetch and drop it there")
        return ticket.entry

    def _live_entry(self, ticket: Ticket) -> Entry:
        """Return the entry of `ticket`, or raise if it cannot be fetched any more."""
        entry = self._owned_entry(ticket)
        self._check_open()
        if entry.dropped:
            raise ArgumentError(f"{entry} was dropped from the {self.tier} store: fetch before dropping")
        return entry


def removed_error(entry: Entry) -> StoreError:
    """Return the error for a value that another thread removed during a call."""
    return StoreError(f"{entry} was dropped, or its store closed, by another thread during this call")
