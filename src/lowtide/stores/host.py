"""The host tier: values of an accelerator wait in pinned host memory, copied on streams of their own.

Guaranteed by construction: a copy starts after what the caller's stream has queued for the value, a fetched
value is ready for whatever the caller queues next, and device memory is held until its copy has ended. Never more
than `max_in_flight_bytes` are on their way out. On a machine without an accelerator it is refused, since
host memory is where the values already are. The copies (`AcceleratorCopies`) are untested on a GPU; the
bookkeeping is tested through the interface below.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from typing import Any, Protocol

import torch

from .._errors import ArgumentError, StoreError
from .._units import parse_bytes
from ._base import Entry, Store, StoreStats, Ticket
from ._geometry import Geometry, geometry_of


class Copy(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Whether it has ended."""

    def wait(self) -> None:
        """Block until it has ended."""

    def order(self) -> None:
        """Have what the caller's stream does next wait for it."""


class Copies(Protocol):
    """How values cross between a device and the host."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy `source` into `target`, after what the caller's stream has queued."""

    def pinned(self, geometry: Geometry) -> torch.Tensor:
        """Host memory from which, and to which, copies can run by themselves."""


class AcceleratorCopies:
    """Copies on a side stream for each device. Untested on a GPU."""

    def __init__(self) -> None:
        if not torch.accelerator.is_available():
            raise ArgumentError(
                "the host store is for the values of an accelerator, and this machine has none: here host memory "
                "is the same memory. Use DiskStore, or recompute"
            )
        self._streams: dict[tuple[torch.device, bool], torch.Stream] = {}

    def pinned(self, geometry: Geometry) -> torch.Tensor:
        """Page-locked host memory of this geometry."""
        return torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device="cpu", pin_memory=True)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Copy on this device's stream for this direction."""
        inward = target.device.type != "cpu"
        on_device = target if inward else source
        device = on_device.device
        stream = self._streams.get((device, inward))
        if stream is None:
            stream = self._streams.setdefault((device, inward), torch.Stream(device=device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            target.copy_(source, non_blocking=True)
        # Whoever frees it meanwhile, the allocator gives it to nobody else until the copy has ended.
        on_device.record_stream(stream)
        return _StreamCopy(stream.record_event(), device)


class _StreamCopy:
    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)


class _HostEntry(Entry):
    __slots__ = ("ahead", "host", "incoming", "outgoing")

    def __init__(self, name: str, geometry: Geometry, host: torch.Tensor) -> None:
        super().__init__(name, geometry)
        self.host: torch.Tensor | None = host
        self.outgoing: Copy | None = None
        self.incoming: Copy | None = None
        self.ahead: torch.Tensor | None = None


class HostStore(Store):
    """Values in pinned host memory."""

    tier = "host"

    def __init__(
        self,
        *,
        max_in_flight_bytes: str | int = "1 GiB",
        max_prefetch_bytes: str | int | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._max_in_flight = parse_bytes(max_in_flight_bytes)
        self._max_ahead = parse_bytes(max_prefetch_bytes) if max_prefetch_bytes is not None else self._max_in_flight
        self._copies = copies if copies is not None else AcceleratorCopies()
        self._lock = threading.RLock()  # what sees memory being taken or freed may come back here
        self._entries: set[_HostEntry] = set()
        self._collected: deque[_HostEntry] = deque()
        self._leaving: deque[tuple[Copy, int]] = deque()  # oldest first
        self._prefetch_queue: dict[_HostEntry, None] = {}
        self._closed = False
        self._stats = StoreStats(self.tier, 0, 0, 0, 0, 0)

    @property
    def max_prefetch_bytes(self) -> int:
        """The most that is copied back ahead of what is fetched."""
        return self._max_ahead

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        """Start copying `tensor` to the host, once there is room among the copies under way."""
        self._check_open()
        geometry = geometry_of(tensor)
        source = tensor.detach() if tensor.requires_grad else tensor
        entry = _HostEntry(name, geometry, self._copies.pinned(geometry))
        ticket = Ticket(self, entry)
        with self._lock:
            self._drop_collected()
            waited = self._make_room(entry.nbytes)
            assert entry.host is not None
            entry.outgoing = self._copies.start(entry.host, source)
            self._entries.add(entry)
            self._leaving.append((entry.outgoing, entry.nbytes))
            stats = self._stats
            in_flight = stats.in_flight_bytes + entry.nbytes
            self._count(
                stored_bytes=stats.stored_bytes + entry.nbytes,
                put_bytes=stats.put_bytes + entry.nbytes,
                in_flight_bytes=in_flight,
                peak_in_flight_bytes=max(stats.peak_in_flight_bytes, in_flight),
                put_wait_seconds=stats.put_wait_seconds + waited,
            )
        if entry.nbytes > self._max_in_flight:
            entry.outgoing.wait()
        return ticket

    def fetch(self, ticket: Ticket) -> torch.Tensor:
        """The value on its device, ready for what the caller queues next."""
        entry = self._live_host_entry(ticket)
        with self._lock:
            self._prefetch_queue.pop(entry, None)
            if entry.ahead is None:
                self._bring(entry)
            else:
                self._count(
                    prefetch_hits=self._stats.prefetch_hits + 1,
                    prefetched_bytes=self._stats.prefetched_bytes - entry.nbytes,
                )
            tensor, entry.ahead = entry.ahead, None
            incoming, entry.incoming = entry.incoming, None
            assert tensor is not None
            assert incoming is not None
            incoming.order()
            self._count(fetched_bytes=self._stats.fetched_bytes + entry.nbytes)
            self._start_prefetches()
        return tensor

    def is_resident(self, ticket: Ticket) -> bool:
        """Whether the value is back on its device, or on its way there."""
        return self._live_host_entry(ticket).ahead is not None

    def drain(self, nbytes: int) -> int:
        """Wait for the oldest copies on their way to the host, until `nbytes` have left the device."""
        self._check_open()
        with self._lock:
            self._drop_collected()
            before = self._stats.in_flight_bytes
            while self._leaving and before - self._stats.in_flight_bytes < nbytes:
                self._leaving[0][0].wait()
                self._drop_collected()
            return max(0, before - self._stats.in_flight_bytes)

    def prefetch(self, ticket: Ticket) -> None:
        """Start copying the value back when its turn has come and there is room."""
        entry = self._live_host_entry(ticket)
        with self._lock:
            if entry.ahead is None and entry.nbytes <= self._max_ahead:
                self._prefetch_queue[entry] = None
                self._start_prefetches()

    def drop(self, ticket: Ticket) -> None:
        """Forget the value."""
        entry = self._owned_entry(ticket)
        with self._lock:
            self._drop_collected()
            if isinstance(entry, _HostEntry):
                self._remove(entry)

    def stats(self) -> StoreStats:
        """What happened until now."""
        with self._lock:
            self._drop_collected()
            in_flight, ahead = self._stats.in_flight_bytes, self._stats.prefetched_bytes
            return dataclasses.replace(self._stats, values=len(self._entries), resident_bytes=in_flight + ahead)

    def close(self) -> None:
        """Wait for the copies under way and forget everything."""
        with self._lock:
            self._closed = True
            for entry in list(self._entries):
                self._remove(entry)
            while self._leaving:
                self._leaving[0][0].wait()
                self._drop_collected()

    def _ticket_collected(self, entry: Entry) -> None:
        if isinstance(entry, _HostEntry):
            self._collected.append(entry)

    def _live_host_entry(self, ticket: Ticket) -> _HostEntry:
        entry = self._live_entry(ticket)
        assert isinstance(entry, _HostEntry)
        return entry

    def _count(self, **changes: Any) -> None:
        self._stats = dataclasses.replace(self._stats, **changes)

    def _make_room(self, nbytes: int) -> float:
        """Wait for the oldest copies until `nbytes` more may be under way; how many seconds that took."""
        started = time.perf_counter()
        while self._leaving and self._stats.in_flight_bytes + nbytes > self._max_in_flight:
            self._leaving[0][0].wait()
            self._drop_collected()
        return time.perf_counter() - started

    def _bring(self, entry: _HostEntry) -> None:
        if entry.host is None:
            raise StoreError(f"{entry} was dropped, or its store closed, by another thread while it was fetched")
        assert entry.outgoing is not None
        entry.outgoing.order()
        ahead = entry.geometry.empty()
        entry.incoming = self._copies.start(ahead, entry.host)
        entry.ahead = ahead

    def _start_prefetches(self) -> None:
        while self._prefetch_queue:
            entry = next(iter(self._prefetch_queue))
            if self._stats.prefetched_bytes + entry.nbytes > self._max_ahead:
                return
            del self._prefetch_queue[entry]
            try:
                self._bring(entry)
            except (RuntimeError, MemoryError):
                continue  # no memory for a hint
            ahead = self._stats.prefetched_bytes + entry.nbytes
            self._count(prefetched_bytes=ahead, peak_prefetched_bytes=max(self._stats.peak_prefetched_bytes, ahead))

    def _drop_collected(self) -> None:
        """Let go of what has ended and of what nobody holds."""
        while self._leaving and self._leaving[0][0].done():
            _, nbytes = self._leaving.popleft()
            self._count(in_flight_bytes=self._stats.in_flight_bytes - nbytes)
        while self._collected:
            self._remove(self._collected.popleft())

    def _remove(self, entry: _HostEntry) -> None:
        if entry not in self._entries:  # or its put failed
            return
        entry.dropped = True
        self._entries.remove(entry)
        self._prefetch_queue.pop(entry, None)
        if entry.ahead is not None:
            self._count(prefetched_bytes=self._stats.prefetched_bytes - entry.nbytes)
        for copy in (entry.outgoing, entry.incoming):
            if copy is not None and not copy.done():
                copy.wait()  # host memory must not be reused under a copy
        entry.host = entry.ahead = entry.outgoing = entry.incoming = None
        self._count(stored_bytes=self._stats.stored_bytes - entry.nbytes)
