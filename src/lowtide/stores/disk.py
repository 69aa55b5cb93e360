"""The disk tier: values wait in a private spill file, written and read by background threads.

`put` returns as soon as the value is queued, or blocks while more than `max_in_flight_bytes` would wait to
be written: memory is bounded, not only moved. `prefetch` has values read in the order given, at most
`max_prefetch_bytes` ahead of what is fetched. A write that fails (full disk, quota, a broken device) loses
nothing: that value stays in memory, one `LowtideWarning` is issued, and `ticket.fell_back` says so. A damaged
block is a `DamagedValueError`, never a wrong value. Nothing is left behind, however the process ends.

Memory is made in the calling thread only: by `fetch`, what `bytes_to_fetch` says; by `fetch`, `prefetch` and `drop`,
what was prefetched and has its turn, within `max_prefetch_bytes`; by `put`, nothing (on an accelerator, a host copy).
It is freed by a writer thread as soon as it is written, without a lock; by whoever lets a ticket go.
A value stays on the disk when it was fetched: letting go of the tensor again writes nothing.

Not done: the operating system's page cache is used and not bypassed (it gives way when memory is short, and is
not counted here); values of an accelerator are copied to ordinary memory first, synchronously (untested
on a GPU); the file is not encrypted. A store belongs to the process that made it and says so after a fork.
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
    """Values in a file that nobody else can find.

    `directory` should be on a local disk (a tmpfs is memory); it is made, for this user only, if it does not
    exist, and is the system's directory for temporary files if not given. `threads` write and as many read.
    With `record_timeline`, `timeline()` tells when the disk was busy and when somebody waited for it.

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
        ahead = parse_bytes(max_prefetch_bytes) if max_prefetch_bytes is not None else in_flight
        if threads < 1:
            raise ArgumentError(f"a disk store needs at least one thread, not {threads}")
        self._pid = os.getpid()
        self._queue = DiskQueue(SpillFile(directory), threads, in_flight, ahead, Timeline(record_timeline))
        self._end = weakref.finalize(self, _end, self._queue, self._pid)

    @property
    def directory(self) -> str:
        """Where the spill file is, without a name."""
        return self._queue.file.directory

    @property
    def max_prefetch_bytes(self) -> int:
        """The most that is read ahead of what is fetched."""
        return self._queue.max_prefetch_bytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._queue.closed

    def put(self, tensor: torch.Tensor, name: str = "") -> Ticket:
        """Have `tensor` written in the background, once there is room in the queue.

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
        self._queue.put(entry)
        self._report_background_errors()
        return ticket

    def fetch(self, ticket: Ticket) -> torch.Tensor:
        """The value: from memory if it is still, or already, there; else it is read now."""
        entry = self._live_entry(ticket)
        geometry = cast(_DiskTicket, ticket).geometry
        tensor = self._queue.fetch(entry)
        return tensor if geometry.device == _CPU else geometry.empty().copy_(tensor)

    def is_resident(self, ticket: Ticket) -> bool:
        """Whether the value is still, or already, in memory."""
        entry = self._live_entry(ticket)
        return cast(_DiskTicket, ticket).geometry.device == _CPU and self._queue.is_resident(entry)

    def bytes_to_fetch(self, ticket: Ticket) -> int:
        """What `fetch` would newly take: nothing also for what is being read ahead, whose memory is there."""
        entry = self._live_entry(ticket)
        there = cast(_DiskTicket, ticket).geometry.device == _CPU and self._queue.has_memory(entry)
        return 0 if there else entry.nbytes

    def prefetch(self, ticket: Ticket) -> None:
        """Have the value read in the background, after those hinted at before. Returns at once.

        A value larger than `max_prefetch_bytes` is not read ahead.
        """
        self._queue.prefetch(self._live_entry(ticket))

    def drop(self, ticket: Ticket) -> None:
        """Forget the value. A write that has not begun is not done."""
        entry = self._owned_entry(ticket)
        self._check_process()
        self._queue.drop(cast(DiskEntry, entry))

    def drain(self, nbytes: int) -> int:
        """Wait until `nbytes` of what waits to be written have left memory, or nothing waits; how many did."""
        self._check_process()
        self._check_open()
        left = self._queue.drain(nbytes)
        self._report_background_errors()
        return left

    def flush(self) -> None:
        """Wait until everything put is on the disk, or has fallen back to memory."""
        self._check_process()
        self._check_open()
        self._queue.flush()
        self._report_background_errors()

    def timeline(self) -> tuple[Span, ...]:
        """What was recorded until now, in the order in which it ended. Also after `close`."""
        return self._queue.timeline.spans()

    def stats(self) -> StoreStats:
        """What happened until now."""
        self._check_process()
        return self._queue.stats()

    def close(self) -> None:
        """Stop the threads, at the latest after the block each is at, and give the disk back."""
        self._end()
        if os.getpid() == self._pid:
            self._report_background_errors()

    def _ticket_collected(self, entry: Entry) -> None:
        if os.getpid() == self._pid:
            self._queue.ticket_collected(cast(DiskEntry, entry))

    def _live_entry(self, ticket: Ticket) -> DiskEntry:
        self._check_process()
        entry = super()._live_entry(ticket)
        self._report_background_errors()
        return cast(DiskEntry, entry)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                f"this disk store was made by process {self._pid} and cannot be used in its fork {os.getpid()}: "
                "its threads are not here. Make a store in each process"
            )

    def _report_background_errors(self) -> None:
        """Say, in the caller's thread, what happened in the background."""
        self._queue.check_threads()
        write_error, self._queue.write_error = self._queue.write_error, None
        if write_error is not None:
            warnings.warn(
                f"a write to the spill file in {self.directory} failed ({write_error}). Nothing is lost: such values stay "
                "in memory, which will be short of what was planned. Free some space there, or pass directory= on "
                "a larger disk",
                LowtideWarning,
                stacklevel=3,
            )


class _DiskTicket(Ticket):
    """A ticket that knows on which device the value was."""

    __slots__ = ("geometry",)

    def __init__(self, store: DiskStore, entry: DiskEntry, geometry: Geometry) -> None:
        super().__init__(store, entry)
        self.geometry = geometry


def _end(queue: DiskQueue, pid: int) -> None:
    if os.getpid() == pid:
        queue.shut_down()
    else:
        queue.close_in_fork()
