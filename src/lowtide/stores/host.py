"""Host tier: values of an accelerator in pinned host memory, copied on side streams.

A copy starts after the work that the caller has queued on its stream. A fetched value is ready for the work that
the caller queues next. Device memory is held until its copy has ended. At most `max_in_flight_bytes` are being
copied to the host. Without an accelerator the store is refused, because values are already in host memory.
`AcceleratorCopies` is not tested on a GPU; `HostStore` is tested with other implementations of `Copies`.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from typing import Any, Protocol

import torch

from .._errors import ArgumentError
from .._units import parse_bytes
from ._base import Entry, Store, StoreStats, Ticket, removed_error
from ._geometry import Geometry, geometry_of


class Copy(Protocol):
    """A running copy."""

    def done(self) -> bool:
        """Return whether the copy has ended."""

    def wait(self) -> None:
        """Block until the copy has ended."""

    def order(self) -> None:
        """Make later work on the caller's stream wait for the copy."""


class Copies(Protocol):
    """Copies between a device and the host."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Start a copy of `source` to `target`, after the work queued on the caller's stream."""

    def pinned(self, geometry: Geometry) -> torch.Tensor:
        """Return host memory for asynchronous copies."""


class AcceleratorCopies:
    """Copies on side streams, one per device and direction. Not tested on a GPU."""

    def __init__(self) -> None:
        if not torch.accelerator.is_available():
            raise ArgumentError(
                "the host store is for values on an accelerator, and this machine has none: values are already in "
                "host memory. Use DiskStore, or recompute"
            )
        self._streams: dict[tuple[torch.device, bool], torch.Stream] = {}

    def pinned(self, geometry: Geometry) -> torch.Tensor:
        """Return page-locked host memory of this geometry."""
        return torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device="cpu", pin_memory=True)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Start a copy on the stream of this device and direction."""
        inward = target.device.type != "cpu"
        on_device = target if inward else source
        device = on_device.device
        stream = self._streams.get((device, inward))
        if stream is None:
            stream = self._streams.setdefault((device, inward), torch.Stream(device=device))
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            target.copy_(source, non_blocking=True)
        # The allocator must not reuse the memory before the copy has ended.
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
    __slots__ = ("device_copy", "host", "incoming", "outgoing")

    def __init__(self, name: str, geometry: Geometry, host: torch.Tensor) -> None:
        super().__init__(name, geometry)
        self.host: torch.Tensor | None = host
        self.outgoing: Copy | None = None
        self.incoming: Copy | None = None
        self.device_copy: torch.Tensor | None = None


class HostStore(Store):
    """Store that copies values to pinned host memory."""

    tier = "host"

    def __init__(
        self,
        *,
        max_in_flight_bytes: str | int = "1 GiB",
        max_prefetch_bytes: str | int | None = None,
        copies: Copies | None = None,
    ) -> None:
        self._max_in_flight = parse_bytes(max_in_flight_bytes)
        self._max_prefetch = parse_bytes(max_prefetch_bytes) if max_prefetch_bytes is not None else self._max_in_flight
        self.copies = copies if copies is not None else AcceleratorCopies()
        self._lock = threading.RLock()  # reentrant: callbacks on allocation or release may use the store
        self._entries: set[_HostEntry] = set()
        self._collected: deque[_HostEntry] = deque()
        self._outgoing: deque[tuple[Copy, int]] = deque()  # oldest first
        self._prefetch_queue: dict[_HostEntry, None] = {}
        self._closed = False
        self._stats = StoreStats(self.tier, 0, 0, 0, 0, 0)

    @property
    def max_prefetch_bytes(self) -> int:
        """Upper limit on bytes prefetched and not yet fetched."""
        return self._max_prefetch

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        """Start copying `tensor` to the host. Waits while too many bytes are being copied."""
        self._check_open()
        geometry = geometry_of(tensor)
        source = tensor.detach() if tensor.requires_grad else tensor
        entry = _HostEntry(name, geometry, self.copies.pinned(geometry))
        ticket = Ticket(self, entry)
        with self._lock:
            self._process_finished()
            waited = self._wait_for_capacity(entry.nbytes)
            assert entry.host is not None
            entry.outgoing = self.copies.start(entry.host, source)
            self._entries.add(entry)
            self._outgoing.append((entry.outgoing, entry.nbytes))
            stats = self._stats
            in_flight = stats.in_flight_bytes + entry.nbytes
            self._update_stats(
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
        """Return the value on its device, ready for work that the caller queues next."""
        entry = self._live_host_entry(ticket)
        with self._lock:
            self._prefetch_queue.pop(entry, None)
            if entry.device_copy is None:
                self._start_copy_back(entry)
            else:
                self._update_stats(
                    prefetch_hits=self._stats.prefetch_hits + 1,
                    prefetched_bytes=self._stats.prefetched_bytes - entry.nbytes,
                )
            tensor, entry.device_copy = entry.device_copy, None
            incoming, entry.incoming = entry.incoming, None
            assert tensor is not None
            assert incoming is not None
            incoming.order()
            self._update_stats(fetched_bytes=self._stats.fetched_bytes + entry.nbytes)
            self._start_prefetches()
        return tensor

    def is_resident(self, ticket: Ticket) -> bool:
        """Return whether the value is prefetched or being prefetched."""
        return self._live_host_entry(ticket).device_copy is not None

    def drain(self, nbytes: int) -> int:
        """Wait for the oldest copies to the host until `nbytes` have left the device. Return the bytes that left."""
        self._check_open()
        with self._lock:
            self._process_finished()
            before = self._stats.in_flight_bytes
            while self._outgoing and before - self._stats.in_flight_bytes < nbytes:
                self._outgoing[0][0].wait()
                self._process_finished()
            return max(0, before - self._stats.in_flight_bytes)

    def prefetch(self, ticket: Ticket) -> None:
        """Queue a copy of the value to its device, after earlier ones and within the limit."""
        entry = self._live_host_entry(ticket)
        with self._lock:
            if entry.device_copy is None and entry.nbytes <= self._max_prefetch:
                self._prefetch_queue[entry] = None
                self._start_prefetches()

    def drop(self, ticket: Ticket) -> None:
        """Delete the value."""
        entry = self._owned_entry(ticket)
        with self._lock:
            self._process_finished()
            if isinstance(entry, _HostEntry):
                self._remove(entry)

    def stats(self) -> StoreStats:
        """Return statistics."""
        with self._lock:
            self._process_finished()
            in_flight, prefetched = self._stats.in_flight_bytes, self._stats.prefetched_bytes
            return dataclasses.replace(self._stats, values=len(self._entries), resident_bytes=in_flight + prefetched)

    def close(self) -> None:
        """Wait for running copies and delete all values."""
        with self._lock:
            self._closed = True
            for entry in list(self._entries):
                self._remove(entry)
            while self._outgoing:
                self._outgoing[0][0].wait()
                self._process_finished()

    def _ticket_collected(self, entry: Entry) -> None:
        if isinstance(entry, _HostEntry):
            self._collected.append(entry)

    def _live_host_entry(self, ticket: Ticket) -> _HostEntry:
        entry = self._live_entry(ticket)
        assert isinstance(entry, _HostEntry)
        return entry

    def _update_stats(self, **changes: Any) -> None:
        self._stats = dataclasses.replace(self._stats, **changes)

    def _wait_for_capacity(self, nbytes: int) -> float:
        """Wait for the oldest copies until `nbytes` more may be in flight. Return the seconds waited."""
        started = time.perf_counter()
        while self._outgoing and self._stats.in_flight_bytes + nbytes > self._max_in_flight:
            self._outgoing[0][0].wait()
            self._process_finished()
        return time.perf_counter() - started

    def _start_copy_back(self, entry: _HostEntry) -> None:
        if entry.host is None:
            raise removed_error(entry)
        assert entry.outgoing is not None
        entry.outgoing.order()
        device_copy = entry.geometry.empty()
        entry.incoming = self.copies.start(device_copy, entry.host)
        entry.device_copy = device_copy

    def _start_prefetches(self) -> None:
        while self._prefetch_queue:
            entry = next(iter(self._prefetch_queue))
            if self._stats.prefetched_bytes + entry.nbytes > self._max_prefetch:
                return
            del self._prefetch_queue[entry]
            try:
                self._start_copy_back(entry)
            except (RuntimeError, MemoryError):
                continue  # no memory for a prefetch
            prefetched = self._stats.prefetched_bytes + entry.nbytes
            self._update_stats(
                prefetched_bytes=prefetched, peak_prefetched_bytes=max(self._stats.peak_prefetched_bytes, prefetched)
            )

    def _process_finished(self) -> None:
        """Count ended copies and drop entries of collected tickets."""
        while self._outgoing and self._outgoing[0][0].done():
            _, nbytes = self._outgoing.popleft()
            self._update_stats(in_flight_bytes=self._stats.in_flight_bytes - nbytes)
        while self._collected:
            self._remove(self._collected.popleft())

    def _remove(self, entry: _HostEntry) -> None:
        if entry not in self._entries:  # dropped already, or its put failed
            return
        entry.dropped = True
        self._entries.remove(entry)
        self._prefetch_queue.pop(entry, None)
        if entry.device_copy is not None:
            self._update_stats(prefetched_bytes=self._stats.prefetched_bytes - entry.nbytes)
        for copy in (entry.outgoing, entry.incoming):
            if copy is not None and not copy.done():
                copy.wait()  # host memory must not be reused during a copy
        entry.host = entry.device_copy = entry.outgoing = entry.incoming = None
        self._update_stats(stored_bytes=self._stats.stored_bytes - entry.nbytes)
