"""Writes and prefetches of the disk store, with a byte limit on each.

At most `max_in_flight_bytes` wait to be written, and at most `max_prefetch_bytes` are prefetched. The memory
of a value is held until the value is written. A value whose write fails stays in memory.

Tensors are allocated in the calling thread, never in a background thread, so that dispatch modes of the caller
can count them. No tensor is allocated or freed with the lock held, because a callback may use the store again.
The threads reference this object, not the store, so that the store can be garbage-collected.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from .._errors import StoreError
from ._base import StoreStats, removed_error
from ._disk_entry import DiskEntry, Read, State
from ._geometry import bytes_of
from ._io_threads import IoThreads
from ._spill_file import SpillFile, Stopped, Written
from ._sync import DeferredFrees, Waiters
from ._timeline import SpanKind, Timeline

CLOSE_TIMEOUT_SECONDS = 10.0  # limit on waiting for fetches of other threads; an interrupted fetch never ends


class DiskQueue:
    """Writes entries in the background and prefetches them."""

    def __init__(
        self, file: SpillFile, threads: int, max_in_flight_bytes: int, max_prefetch_bytes: int, timeline: Timeline
    ) -> None:
        self.file = file
        self.timeline = timeline
        self.max_in_flight_bytes = max_in_flight_bytes
        self.max_prefetch_bytes = max_prefetch_bytes
        self.closed = False
        self.write_error: str | None = None  # of the first failed write, until a caller has reported it
        self._lock = threading.Lock()
        self.waiters = Waiters()
        self.entries: set[DiskEntry] = set()
        self._collected: deque[DiskEntry] = deque()
        self._deferred = DeferredFrees()
        self._prefetch_queue: dict[DiskEntry, None] = {}  # in the order of the `prefetch` calls
        self._fetching = 0  # threads reading in `fetch`
        self._in_flight = self._peak_in_flight = self._prefetched = self._peak_prefetched = 0
        self._released_bytes = 0  # total that was in flight and has been written or dropped
        self._stored = self._fallback_bytes = self._put = self._fetched = self._hits = self._fallbacks = 0
        self._put_wait = self._fetch_wait = 0.0
        # Separate threads: a read never waits behind writes.
        self.writers = IoThreads(threads, "lowtide-write")
        try:
            self.readers = IoThreads(threads, "lowtide-read")
        except BaseException:
            self.writers.stop()
            raise

    def put(self, entry: DiskEntry) -> None:
        """Queue a write of `entry`. Waits for the limit; a value larger than the limit is written before returning."""
        nbytes = entry.nbytes
        within_limit = nbytes <= self.max_in_flight_bytes

        def reserve() -> bool:
            if within_limit and self._in_flight + nbytes > self.max_in_flight_bytes:
                return False
            # No call that an interrupt could stop, until the entry is counted and can be dropped.
            entry.in_flight_bytes = nbytes if within_limit else 0
            self._in_flight += entry.in_flight_bytes
            self._put += nbytes
            self._stored += nbytes
            self.entries.add(entry)
            self._peak_in_flight = max(self._peak_in_flight, self._in_flight)
            return True

        def finished() -> bool:
            return (entry.tensor is None and not entry.writing) or entry.fell_back or entry.dropped

        self._put_wait += self._wait_until(reserve, "wait for write", nbytes, entry.name)
        self.writers.submit(partial(self._write, entry))
        if not within_limit:
            self._put_wait += self._wait_until(finished, "wait for write", nbytes, entry.name)

    def fetch(self, entry: DiskEntry) -> torch.Tensor:
        """Return the value: still in memory, prefetched, or read now."""
        tensor: torch.Tensor | None = None
        written: Written | None = None
        reading = done = False
        started = 0.0

        def take() -> bool:
            nonlocal tensor, written, reading, done, started
            self._check_live(entry)
            read = entry.read
            if read is not None and read.state is State.RUNNING:
                return False
            self._prefetch_queue.pop(entry, None)
            tensor, entry.read = entry.tensor, None
            damage = entry.damage if tensor is None else entry.find_damage(tensor)
            if damage is not None:
                raise entry.damaged_error(damage)
            done = tensor is not None
            if read is not None:
                done = read.state is State.DONE
                tensor, read.buffer = read.buffer, None  # a late job must not keep it alive
                read.state = State.TAKEN
                self._prefetched -= entry.nbytes
                self._hits += done
            if done:
                self._fetched += entry.nbytes
            else:
                written = entry.written
                started = time.perf_counter()
                entry.readers += 1
                self._fetching += 1
                reading = True
            return True

        try:
            self._fetch_wait += self._wait_until(take, "wait for read", entry.nbytes, entry.name)
            self._start_prefetches()  # before the read below, to run in parallel
            # After a failed prefetch the value is read again, and the error is raised if it persists.
            if tensor is None:
                tensor = entry.geometry.empty()
            if reading:
                assert written is not None
                self._read(entry, written, tensor)
                done = True
        finally:
            if reading:
                with self._deferred, self._lock:
                    self._fetching -= 1
                    self._fetch_wait += time.perf_counter() - started
                    self._fetched += entry.nbytes if done else 0
                    self._reader_done(entry)
                self.timeline.add("wait for read", started, entry.nbytes, entry.name)
        return tensor

    def is_resident(self, entry: DiskEntry) -> bool:
        """Return whether `fetch` would neither read nor wait."""
        with self._deferred, self._lock:
            return entry.tensor is not None or (entry.read is not None and entry.read.state is State.DONE)

    def has_memory(self, entry: DiskEntry) -> bool:
        """Return whether the memory of the value is allocated, read or not."""
        with self._deferred, self._lock:
            return entry.tensor is not None or (entry.read is not None and entry.read.buffer is not None)

    def prefetch(self, entry: DiskEntry) -> None:
        """Queue a background read of `entry`, after earlier ones and within the limit."""
        with self._deferred, self._lock:
            self._check_live(entry)
            if entry.read is not None or entry.fell_back or entry.damage or entry.nbytes > self.max_prefetch_bytes:
                return
            self._prefetch_queue[entry] = None
        self._start_prefetches()

    def drop(self, entry: DiskEntry) -> None:
        """Delete `entry`. A running read or write ends first."""
        with self._deferred, self._lock:
            self._discard(entry)
        if self._prefetch_queue:
            self._start_prefetches()

    def ticket_collected(self, entry: DiskEntry) -> None:
        """Drop `entry` without the lock: free its memory now, and update the counts later under the lock."""
        if not self.closed:
            self._collected.append(entry)  # first: an interrupt skips the lines below
        entry.dropped = True  # stops a write at its next block
        entry.tensor = None
        read = entry.read
        if read is not None:
            read.buffer = None
        if not self.closed:
            self.readers.submit(self._drop_collected_and_notify)

    def drain(self, nbytes: int) -> int:
        """Wait until `nbytes` in flight have left memory, or none are in flight. Return the bytes that left."""
        with self._deferred, self._lock:
            self._drop_collected()  # entries that are already gone do not count
            before = self._released_bytes
        self._wait_until(
            lambda: self._released_bytes - before >= nbytes or self._in_flight == 0, "wait for write", nbytes
        )
        return self._released_bytes - before

    def flush(self) -> None:
        """Wait until no bytes are in flight."""
        self._wait_until(lambda: self._in_flight == 0, "wait for write", self._in_flight)

    def stats(self) -> StoreStats:
        """Return consistent statistics."""
        with self._deferred, self._lock:
            self._drop_collected()
            return StoreStats(
                tier="disk",
                values=len(self.entries),
                stored_bytes=self._stored,
                resident_bytes=self._in_flight + self._prefetched + self._fallback_bytes,
                put_bytes=self._put,
                fetched_bytes=self._fetched,
                in_flight_bytes=self._in_flight,
                peak_in_flight_bytes=self._peak_in_flight,
                prefetched_bytes=self._prefetched,
                peak_prefetched_bytes=self._peak_prefetched,
                prefetch_hits=self._hits,
                put_wait_seconds=self._put_wait,
                fetch_wait_seconds=self._fetch_wait,
                fallbacks=self._fallbacks,
                file_bytes=self.file.file_bytes,
            )

    def shut_down(self) -> None:
        """Stop the threads after their current block, and close the file."""
        self.closed = True
        self.writers.stop()
        self.readers.stop()
        if self.writers.has_current() or self.readers.has_current():
            return  # the garbage collector runs in one of the threads, which cannot wait for itself
        self._drop_collected_and_notify()
        self.writers.join()
        self.readers.join()
        end = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        while self._fetching and time.monotonic() < end:
            self.waiters.register().acquire(timeout=0.5)
        with self._deferred, self._lock:
            for entry in self.entries:
                entry.dropped = True
                self._deferred.add(entry.tensor, entry.read)
                entry.tensor = entry.read = None
            self.entries.clear()
            self._prefetch_queue.clear()
            self._stored = self._fallback_bytes = self._in_flight = self._prefetched = 0
        if not self._fetching:  # else the file is closed when this object is freed
            self.file.close()

    def close_in_fork(self) -> None:
        """Close the file in a forked child. The threads do not exist there, and locks may stay locked forever."""
        self.closed = True
        self.file.close()

    def check_threads(self) -> None:
        """Raise `StoreError` if an error escaped in a background thread."""
        self.writers.check()
        self.readers.check()

    def _write(self, entry: DiskEntry) -> None:
        with self._deferred, self._lock:
            self._drop_collected()
            tensor = entry.tensor
            if entry.dropped or self.closed or tensor is None:
                return
            entry.writing = True
        written: Written | None = None
        write_error: str | None = None
        damage = entry.find_damage(tensor)
        try:
            if damage is None:
                with self.timeline.span("write", entry.nbytes, entry.name):
                    written = self.file.write(bytes_of(tensor), stop=lambda: entry.dropped or self.closed)
                damage = entry.find_damage(tensor)
        except Stopped:
            pass
        except BaseException as error:
            write_error = f"{type(error).__name__}: {error}"
        del tensor
        self._write_done(entry, written, damage, write_error)

    def _write_done(
        self, entry: DiskEntry, written: Written | None, damage: str | None, write_error: str | None
    ) -> None:
        with self._deferred, self._lock:
            entry.written = written
            entry.damage = damage
            if entry.dropped or damage is not None:
                self._free_extent(entry)
            elif write_error is not None:
                entry.fell_back = True
                self._fallback_bytes += entry.nbytes
                self._fallbacks += 1
                if self._fallbacks == 1:
                    self.write_error = write_error
            tensor = None
            if written is not None or damage is not None:
                tensor, entry.tensor = entry.tensor, None
        del tensor
        with self._deferred, self._lock:  # the memory is free only now
            entry.writing = False
            self._left_memory(entry)

    def _left_memory(self, entry: DiskEntry) -> None:
        """Update the counts of `entry`, which is no longer in flight."""
        self._in_flight -= entry.in_flight_bytes
        if not entry.fell_back:
            self._released_bytes += entry.in_flight_bytes
        entry.in_flight_bytes = 0
        self.waiters.notify_all()

    def _discard(self, entry: DiskEntry) -> None:
        nbytes = entry.nbytes
        if entry not in self.entries:  # dropped already, or its put was interrupted
            return
        # No call that an interrupt could stop, as in `put`: all counts change, or none.
        entry.dropped = True
        self._stored -= nbytes
        if entry.fell_back:
            self._fallback_bytes -= nbytes
        if not entry.writing:
            self._in_flight -= entry.in_flight_bytes
            self._released_bytes += entry.in_flight_bytes
            entry.in_flight_bytes = 0
        self.entries.remove(entry)
        self._prefetch_queue.pop(entry, None)
        self._deferred.add(entry.tensor)
        entry.tensor = None
        read, entry.read = entry.read, None
        if read is not None:
            if read.state is State.RUNNING:
                read.abandoned = True
            else:
                read.state = State.TAKEN
                self._deferred.add(read.buffer)
                read.buffer = None
                self._prefetched -= entry.nbytes
        if entry.readers == 0:
            self._free_extent(entry)
        self.waiters.notify_all()

    def _drop_collected_and_notify(self) -> None:
        """Drop entries of collected tickets, and notify all waiting threads."""
        with self._deferred, self._lock:
            self._drop_collected()
            self.waiters.notify_all()

    def _start_prefetches(self) -> None:
        """Start the next prefetches within the limit."""
        started_reads: list[tuple[DiskEntry, Read]] = []
        with self._deferred, self._lock:
            for entry in self._prefetch_queue:
                if entry.written is None:
                    continue  # still in memory
                if self._prefetched + entry.nbytes > self.max_prefetch_bytes:
                    break
                self._prefetched += entry.nbytes
                self._peak_prefetched = max(self._peak_prefetched, self._prefetched)
                entry.read = Read()
                started_reads.append((entry, entry.read))
            for entry, _ in started_reads:
                del self._prefetch_queue[entry]
        while started_reads:
            entry, read = started_reads[0]
            try:
                buffer = entry.geometry.empty()  # without the lock: a dispatch mode may use the store
            except BaseException as error:
                self._cancel_queued(started_reads)
                if isinstance(error, (RuntimeError, MemoryError)):
                    return  # no memory for a prefetch
                raise
            del started_reads[0]
            with self._deferred, self._lock:
                if read.state is not State.QUEUED or entry.dropped:
                    continue
                read.buffer = buffer
            self.readers.submit(partial(self._run_prefetch, entry, read))

    def _cancel_queued(self, started_reads: list[tuple[DiskEntry, Read]]) -> None:
        """Cancel the reads that are still queued."""
        with self._deferred, self._lock:
            for entry, read in started_reads:
                if read.state is State.QUEUED:
                    read.state = State.TAKEN
                    entry.read = None
                    self._prefetched -= entry.nbytes

    def _run_prefetch(self, entry: DiskEntry, read: Read) -> None:
        with self._deferred, self._lock:
            buffer, written = read.buffer, entry.written
            if read.state is not State.QUEUED or self.closed or buffer is None or written is None:
                return
            read.state = State.RUNNING
            entry.readers += 1
        state = State.FAILED
        try:
            self._read(entry, written, buffer)
            state = State.DONE
        except (StoreError, MemoryError):
            pass  # `fetch` reads again and raises the error
        finally:
            del buffer
            with self._deferred, self._lock:
                read.state = state
                if read.abandoned or state is State.FAILED:
                    self._deferred.add(read.buffer)
                    read.buffer = None
                if read.abandoned:
                    self._prefetched -= entry.nbytes
                self._reader_done(entry)

    def _read(self, entry: DiskEntry, written: Written, buffer: torch.Tensor) -> None:
        with self.timeline.span("read", entry.nbytes, entry.name):
            self.file.read(written, bytes_of(buffer), entry)

    def _reader_done(self, entry: DiskEntry) -> None:
        entry.readers -= 1
        if entry.dropped and entry.readers == 0:
            self._free_extent(entry)
        self.waiters.notify_all()

    def _free_extent(self, entry: DiskEntry) -> None:
        """Free the disk space in a writer thread, before the next write."""
        written, entry.written = entry.written, None
        if written is not None and not self.closed:
            self.writers.submit(partial(self.file.free, written.extent))

    def _check_live(self, entry: DiskEntry) -> None:
        if self.closed or entry.dropped:
            raise removed_error(entry)

    def _drop_collected(self) -> None:
        while self._collected:
            self._discard(self._collected[0])
            self._collected.popleft()

    def _wait_until(self, attempt: Callable[[], bool], kind: SpanKind, nbytes: int, name: str = "") -> float:
        """Call `attempt` with the lock after every change until it returns True. Return the seconds waited.

        No lock is held while waiting, so an interrupt leaves a consistent state. A condition variable would take
        its lock again on the way out, and an interrupt at that point would release a lock that is not held.
        """
        started = None
        while True:
            with self._deferred, self._lock:
                if self.closed:
                    raise StoreError("the disk store was closed by another thread during this call")
                self.check_threads()
                self._drop_collected()
                if attempt():
                    break
                if self.writers.has_current() or self.readers.has_current():
                    raise StoreError(
                        "a thread of the disk store cannot wait for itself: callbacks must not wait for the store"
                    )
                changed = self.waiters.register()
            if started is None:
                started = time.perf_counter()
            changed.acquire(timeout=1.0)  # timeout: a failed thread may not notify
        if started is None:
            return 0.0
        self.timeline.add(kind, started, nbytes, name)
        return time.perf_counter() - started
