"""Disk tier: values in a private spill file, written and read by background threads.

`put` queues a write and returns. It blocks while more than `max_in_flight_bytes` would wait to be written.
`prefetch` reads values in the order of the calls, up to `max_prefetch_bytes` before they are fetched. If a write
fails (full disk, quota, broken device), the value stays in memory, `ticket.fell_back` is True, and one
`LowtideWarning` is issued. A damaged block raises `DamagedValueError`. No file remains, however the process
ends. A fetched value stays on disk: offloading it again needs no write.

Memory is allocated in the calling thread only. `fetch` allocates `bytes_to_fetch`. `fetch`, `prefetch` and `drop`
may also allocate the next prefetched values, within `max_prefetch_bytes`. `put` allocates only for values on an
accelerator: a copy in host memory. A writer thread frees the memory of a value after the write.

Limitations: the page cache of the operating system is used and not counted. Values on an accelerator are copied
synchronously to unpinned host memory (not tested on a GPU). The file is not encrypted. A store cannot be used in
a forked child process.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import cast

import torch

from .._errors import ArgumentError, LowtideWarning, StoreError
from .._units import parse_bytes
from ._base import Entry, Store, StoreStats, Ticket
from ._disk_entry import DiskEntry
from ._disk_queue import DiskQueue
from ._geometry import Geometry, geometry_of
from ._spill_file import SpillFile
from ._timeline import Span, Timeline

_CPU = torch.device("cpu")


class DiskStore(Store):
    """Store that writes values to an unnamed file.

    `directory` should be on a local disk, not on a tmpfs, which is memory. It is created, for this user only, if
    it does not exist. The default is the directory for temporary files. `threads` threads write and as many read.
    With `record_timeline`, `timeline()` returns the times of all writes, reads and waits.

    >>> import torch
    >>> from lowtide.stores import DiskStore
    >>> with DiskStore(max_in_flight_bytes="64 MiB") as store:
    ...     ticket = store.put(torch.arange(4.0), "positions")
    ...     store.fetch(ticket)
    tensor([0., 1., 2., 3.])
    """

    tier = "disk"

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_in_flight_bytes: str | int = "256 MiB",
        max_prefetch_bytes: str | int | None = None,
        threads: int = 2,
        record_timeline: bool = False,
    ) -> None:
        in_flight = parse_bytes(max_in_flight_bytes)
        prefetch = parse_bytes(max_prefetch_bytes) if max_prefetch_bytes is not None else in_flight
        if threads < 1:
            raise ArgumentError(f"a disk store needs at least one thread, not {threads}")
        self._pid = os.getpid()
        self.queue = DiskQueue(SpillFile(directory), threads, in_flight, prefetch, Timeline(record_timeline))
        self._finalize = weakref.finalize(self, _shut_down, self.queue, self._pid)

    @property
    def directory(self) -> str:
        """Directory of the spill file."""
        return self.queue.file.directory

    @property
    def max_prefetch_bytes(self) -> int:
        """Upper limit on bytes prefetched and not yet fetched."""
        return self.queue.max_prefetch_bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.queue.closed

    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        """Queue a background write of `tensor`. Waits while the queue is full.

        A tensor larger than `max_in_flight_bytes` is written before this returns.
        """
        self._check_process()
        self._check_open()
        self._report_background_errors()
        geometry = geometry_of(tensor)
        if tensor.device != _CPU:
            held = geometry._replace(device=_CPU).empty().copy_(tensor)
        else:
            held = tensor.detach() if tensor.requires_grad else tensor
        entry = DiskEntry(name, geometry._replace(device=_CPU), held)
        ticket = _DiskTicket(self, entry, geometry)
        del held
        self.queue.put(entry)
        self._report_background_errors()
        return ticket

    def fetch(self, ticket: Ticket) -> torch.Tensor:
        """Return the value, from memory if it is still there or prefetched, else from disk."""
        entry = self._live_entry(ticket)
        geometry = cast(_DiskTicket, ticket).geometry
        tensor = self.queue.fetch(entry)
        return tensor if geometry.device == _CPU else geometry.empty().copy_(tensor)

    def is_resident(self, ticket: Ticket) -> bool:
        """Return whether the value is still in memory or prefetched."""
        entry = self._live_entry(ticket)
        return cast(_DiskTicket, ticket).geometry.device == _CPU and self.queue.is_resident(entry)

    def bytes_to_fetch(self, ticket: Ticket) -> int:
        """Return the bytes that `fetch` would allocate. 0 also for a value that is being prefetched."""
        entry = self._live_entry(ticket)
        has_memory = cast(_DiskTicket, ticket).geometry.device == _CPU and self.queue.has_memory(entry)
        return 0 if has_memory else entry.nbytes

    def prefetch(self, ticket: Ticket) -> None:
        """Queue a background read of the value, after earlier ones. Returns immediately.

        A value larger than `max_prefetch_bytes` is not prefetched.
        """
        self.queue.prefetch(self._live_entry(ticket))

    def drop(self, ticket: Ticket) -> None:
        """Delete the value. A write that has not started is cancelled."""
        entry = self._owned_entry(ticket)
        self._check_process()
        self.queue.drop(cast(DiskEntry, entry))

    def drain(self, nbytes: int) -> int:
        """Wait until `nbytes` in flight have left memory, or none are in flight. Return the bytes that left."""
        self._check_process()
        self._check_open()
        released_bytes = self.queue.drain(nbytes)
        self._report_background_errors()
        return released_bytes

    def flush(self) -> None:
        """Wait until every value is on disk or has fallen back to memory."""
        self._check_process()
        self._check_open()
        self.queue.flush()
        self._report_background_errors()

    def timeline(self) -> tuple[Span, ...]:
        """Return the spans recorded so far, in the order in which they ended. Works after `close`, too."""
        return self.queue.timeline.spans()

    def stats(self) -> StoreStats:
        """Return statistics."""
        self._check_process()
        return self.queue.stats()

    def close(self) -> None:
        """Stop the threads after their current block, and free the disk space."""
        self._finalize()
        if os.getpid() == self._pid:
            self._report_background_errors()

    def _ticket_collected(self, entry: Entry) -> None:
        if os.getpid() == self._pid:
            self.queue.ticket_collected(cast(DiskEntry, entry))

    def _live_entry(self, ticket: Ticket) -> DiskEntry:
        self._check_process()
        entry = super()._live_entry(ticket)
        self._report_background_errors()
        return cast(DiskEntry, entry)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                f"this disk store was created by process {self._pid} and cannot be used in its fork {os.getpid()}, "
                "which does not have its threads. Create a store in each process"
            )

    def _report_background_errors(self) -> None:
        """Raise or warn, in the thread of the caller, about errors in background threads."""
        self.queue.check_threads()
        write_error, self.queue.write_error = self.queue.write_error, None
        if write_error is not None:
            warnings.warn(
                f"a write to the spill file in {self.directory} failed ({write_error}). Nothing is lost: values that "
                "cannot be written stay in memory, so more memory is used than planned. Free some space there, or "
                "pass directory= on a larger disk",
                LowtideWarning,
                stacklevel=3,
            )


class _DiskTicket(Ticket):
    """Ticket with the original geometry, including the device."""

    __slots__ = ("geometry",)

    def __init__(self, store: DiskStore, entry: DiskEntry, geometry: Geometry) -> None:
        super().__init__(store, entry)
        self.geometry = geometry


def _shut_down(queue: DiskQueue, pid: int) -> None:
    if os.getpid() == pid:
        queue.shut_down()
    else:
        queue.close_in_fork()
