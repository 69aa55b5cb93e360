"""Writes and prefetches of the disk store, with a byte limit on each.

Guaranteed: never more than `max_in_flight_bytes` wait to be written and never more than `max_prefetch_bytes`
are read ahead; a value's memory is held until it is written, and no longer; a value whose write fails stays
in memory. All tensors are made in the thread that calls, never in a background thread, so that whoever
counts memory there sees them. None is made or freed under the lock, because whoever is told of it may come
back here. The threads hold this object and never the store, which can so be collected.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from .._errors import StoreError
from ._base import StoreStats
from ._disk_entry import DiskEntry, Read, State
from ._geometry import bytes_of
from ._io_threads import IoThreads
from ._spill_file import SpillFile, Stopped, Written
from ._sync import DeferredFrees, Waiters
from ._timeline import Kind, Timeline

PATIENCE_SECONDS = 10.0  # of `close` with a fetch in another thread, or one whose end an interrupt has cut off


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
        self.write_error: str | None = None  # why the first write failed, until somebody has been told
        self._lock = threading.Lock()
        self._waiters = Waiters()  # of those who wait; see `_wait_until`
        self._entries: set[DiskEntry] = set()
        self._collected: deque[DiskEntry] = deque()
        self._deferred = DeferredFrees()
        self._prefetch_queue: dict[DiskEntry, None] = {}  # in the order of the hints
        self._fetching = 0  # threads reading in `fetch`
        self._in_flight = self._peak_in_flight = self._ahead = self._peak_ahead = 0
        self._left = 0  # of what was in flight: written or dropped
        self._stored = self._kept = self._put = self._fetched = self._hits = self._fallbacks = 0
        self._put_wait = self._fetch_wait = 0.0
        # Two lanes, so that a read never stands behind writes.
        self._writers = IoThreads(threads, "lowtide-write")
        try:
            self._readers = IoThreads(threads, "lowtide-read")
        except BaseException:
            self._writers.stop()
            raise

    def put(self, entry: DiskEntry) -> None:
        """Take `entry` in, once there is room. One that is larger than the bound is written before this returns."""
        nbytes = entry.nbytes
        waits = nbytes <= self.max_in_flight_bytes

        def enter() -> bool:
            if waits and self._in_flight + nbytes > self.max_in_flight_bytes:
                return False
            # No call in between, at which an interrupt could come, until it is an entry that can be dropped.
            entry.in_flight = nbytes if waits else 0
            self._in_flight += entry.in_flight
            self._put += nbytes
            self._stored += nbytes
            self._entries.add(entry)
            self._peak_in_flight = max(self._peak_in_flight, self._in_flight)
            return True

        def gone() -> bool:
            return (entry.tensor is None and not entry.writing) or entry.fell_back or entry.dropped

        self._put_wait += self._wait_until(enter, "wait for write", nbytes, entry.name)
        self._writers.submit(partial(self._write, entry))
        if not waits:
            self._put_wait += self._wait_until(gone, "wait for write", nbytes, entry.name)

    def fetch(self, entry: DiskEntry) -> torch.Tensor:
        """The value in memory: what is still there, or was read ahead, or is read now."""
        tensor: torch.Tensor | None = None
        written: Written | None = None
        reading = done = False
        started = 0.0

        def take() -> bool:
            nonlocal tensor, written, reading, done, started
            self._check(entry)
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
                tensor, read.buffer = read.buffer, None  # a job that comes too late must not hold it
                read.state = State.TAKEN
                self._ahead -= entry.nbytes
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
            self._start_prefetches()  # first, to be read while this one is
            # A prefetch that failed comes here too, and is told what is wrong if it still is.
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
                    self._reader_left(entry)
                self.timeline.add("wait for read", started, entry.nbytes, entry.name)
        return tensor

    def is_resident(self, entry: DiskEntry) -> bool:
        """Whether `fetch` would neither read nor wait."""
        with self._deferred, self._lock:
            return entry.tensor is not None or (entry.read is not None and entry.read.state is State.DONE)

    def has_memory(self, entry: DiskEntry) -> bool:
        """Whether the memory that `fetch` will give is there, filled or not."""
        with self._deferred, self._lock:
            return entry.tensor is not None or (entry.read is not None and entry.read.buffer is not None)

    def prefetch(self, entry: DiskEntry) -> None:
        """Read `entry` ahead as soon as there is room and its turn has come."""
        with self._deferred, self._lock:
            self._check(entry)
            if entry.read is not None or entry.fell_back or entry.damage or entry.nbytes > self.max_prefetch_bytes:
                return
            self._prefetch_queue[entry] = None
        self._start_prefetches()

    def drop(self, entry: DiskEntry) -> None:
        """Forget `entry`; what a thread is busy with is given back when it is through."""
        with self._deferred, self._lock:
            self._discard(entry)
        if self._prefetch_queue:
            self._start_prefetches()

    def ticket_collected(self, entry: DiskEntry) -> None:
        """Drop `entry` without a lock: its memory now, the rest when somebody has the lock."""
        if not self.closed:
            self._collected.append(entry)  # first: an interrupt here loses what comes after it
        entry.dropped = True  # ends a write at its next block
        entry.tensor = None
        read = entry.read
        if read is not None:
            read.buffer = None
        if not self.closed:
            self._readers.submit(self._tidy)

    def drain(self, nbytes: int) -> int:
        """Wait until `nbytes` of what is in flight have left, or nothing is in flight; how many have left."""
        with self._deferred, self._lock:
            self._drop_collected()  # which counts what is gone already
            before = self._left
        self._wait_until(lambda: self._left - before >= nbytes or self._in_flight == 0, "wait for write", nbytes)
        return self._left - before

    def flush(self) -> None:
        """Wait until nothing is waiting to be written."""
        self._wait_until(lambda: self._in_flight == 0, "wait for write", self._in_flight)

    def stats(self) -> StoreStats:
        """The counts, all of one moment."""
        with self._deferred, self._lock:
            self._drop_collected()
            return StoreStats(
                tier="disk",
                values=len(self._entries),
                stored_bytes=self._stored,
                resident_bytes=self._in_flight + self._ahead + self._kept,
                put_bytes=self._put,
                fetched_bytes=self._fetched,
                in_flight_bytes=self._in_flight,
                peak_in_flight_bytes=self._peak_in_flight,
                prefetched_bytes=self._ahead,
                peak_prefetched_bytes=self._peak_ahead,
                prefetch_hits=self._hits,
                put_wait_seconds=self._put_wait,
                fetch_wait_seconds=self._fetch_wait,
                fallbacks=self._fallbacks,
                file_bytes=self.file.file_bytes,
            )

    def shut_down(self) -> None:
        """End the threads, after the block each is at, and close the file."""
        self.closed = True
        self._writers.stop()
        self._readers.stop()
        if self._writers.has_current() or self._readers.has_current():
            return  # the garbage collector came by in one of them: they end by themselves, and the file with them
        self._tidy()
        self._writers.join()
        self._readers.join()
        end = time.monotonic() + PATIENCE_SECONDS
        while self._fetching and time.monotonic() < end:
            self._waiters.register().acquire(timeout=0.5)
        with self._deferred, self._lock:
            for entry in self._entries:
                entry.dropped = True
                self._deferred.add(entry.tensor, entry.read)
                entry.tensor = entry.read = None
            self._entries.clear()
            self._prefetch_queue.clear()
            self._stored = self._kept = self._in_flight = self._ahead = 0
        if not self._fetching:  # else it is closed with the last who holds it
            self.file.close()

    def close_in_fork(self) -> None:
        """Close the file in a forked child, where the threads are not and the locks may be held for ever."""
        self.closed = True
        self.file.close()

    def check_threads(self) -> None:
        """Raise what has escaped from a background thread."""
        self._writers.check()
        self._readers.check()

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
        self._wrote(entry, written, damage, write_error)

    def _wrote(self, entry: DiskEntry, written: Written | None, damage: str | None, write_error: str | None) -> None:
        with self._deferred, self._lock:
            entry.written = written
            entry.damage = damage
            if entry.dropped or damage is not None:
                self._release(entry)
            elif write_error is not None:
                entry.fell_back = True
                self._kept += entry.nbytes
                self._fallbacks += 1
                if self._fallbacks == 1:
                    self.write_error = write_error
            tensor = None
            if written is not None or damage is not None:
                tensor, entry.tensor = entry.tensor, None
        del tensor
        with self._deferred, self._lock:  # only now it has left
            entry.writing = False
            self._leave(entry)

    def _leave(self, entry: DiskEntry) -> None:
        """It waits no longer; its memory is gone, unless it fell back."""
        self._in_flight -= entry.in_flight
        if not entry.fell_back:
            self._left += entry.in_flight
        entry.in_flight = 0
        self._waiters.notify_all()

    def _discard(self, entry: DiskEntry) -> None:
        nbytes = entry.nbytes
        if entry not in self._entries:  # or its put was interrupted
            return
        # No call in between, as in `put`: an interrupt finds it counted, or not.
        entry.dropped = True
        self._stored -= nbytes
        if entry.fell_back:
            self._kept -= nbytes
        if not entry.writing:
            self._in_flight -= entry.in_flight
            self._left += entry.in_flight
            entry.in_flight = 0
        self._entries.remove(entry)
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
                self._ahead -= entry.nbytes
        if entry.readers == 0:
            self._release(entry)
        self._waiters.notify_all()

    def _tidy(self) -> None:
        """Drop what was forgotten, and have everybody who waits look again."""
        with self._deferred, self._lock:
            self._drop_collected()
            self._waiters.notify_all()

    def _start_prefetches(self) -> None:
        """Begin the reads whose turn it is and for which there is room."""
        begun: list[tuple[DiskEntry, Read]] = []
        with self._deferred, self._lock:
            for entry in self._prefetch_queue:
                if entry.written is None:
                    continue  # still in memory, which is as good
                if self._ahead + entry.nbytes > self.max_prefetch_bytes:
                    break
                self._ahead += entry.nbytes
                self._peak_ahead = max(self._peak_ahead, self._ahead)
                entry.read = Read()
                begun.append((entry, entry.read))
            for entry, _ in begun:
                del self._prefetch_queue[entry]
        while begun:
            entry, read = begun[0]
            try:
                buffer = entry.geometry.empty()  # without the lock: a dispatch mode may act on it
            except BaseException as error:
                self._give_up(begun)
                if isinstance(error, (RuntimeError, MemoryError)):
                    return  # no memory for a hint
                raise
            del begun[0]
            with self._deferred, self._lock:
                if read.state is not State.QUEUED or entry.dropped:
                    continue
                read.buffer = buffer
            self._readers.submit(partial(self._read_ahead, entry, read))

    def _give_up(self, begun: list[tuple[DiskEntry, Read]]) -> None:
        """Let the reads be that nobody has taken over."""
        with self._deferred, self._lock:
            for entry, read in begun:
                if read.state is State.QUEUED:
                    read.state = State.TAKEN
                    entry.read = None
                    self._ahead -= entry.nbytes

    def _read_ahead(self, entry: DiskEntry, read: Read) -> None:
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
            pass  # whoever fetches reads again, and gets the error
        finally:
            del buffer
            with self._deferred, self._lock:
                read.state = state
                if read.abandoned or state is State.FAILED:
                    self._deferred.add(read.buffer)
                    read.buffer = None
                if read.abandoned:
                    self._ahead -= entry.nbytes
                self._reader_left(entry)

    def _read(self, entry: DiskEntry, written: Written, buffer: torch.Tensor) -> None:
        with self.timeline.span("read", entry.nbytes, entry.name):
            self.file.read(written, bytes_of(buffer), entry)

    def _reader_left(self, entry: DiskEntry) -> None:
        entry.readers -= 1
        if entry.dropped and entry.readers == 0:
            self._release(entry)
        self._waiters.notify_all()

    def _release(self, entry: DiskEntry) -> None:
        """Have the room on the disk given back, by a writer: before the next write, and not in the caller's time."""
        written, entry.written = entry.written, None
        if written is not None and not self.closed:
            self._writers.submit(partial(self.file.free, written.extent))

    def _check(self, entry: DiskEntry) -> None:
        if self.closed or entry.dropped:
            raise StoreError(f"{entry} was dropped, or its store closed, by another thread while it was used")

    def _drop_collected(self) -> None:
        while self._collected:
            self._discard(self._collected[0])
            self._collected.popleft()

    def _wait_until(self, attempt: Callable[[], bool], kind: Kind, nbytes: int, name: str = "") -> float:
        """Make an `attempt`, with the lock, whenever something has changed, until it is one; the seconds waited.

        Nothing is held in between, so that an interrupt (which comes while one waits) finds all in order. A condition
        variable would take its lock again on the way out, and an interrupt just then would let go of one not held.
        """
        started = None
        while True:
            with self._deferred, self._lock:
                if self.closed:
                    raise StoreError("the disk store was closed by another thread while this one waited for it")
                self.check_threads()
                self._drop_collected()
                if attempt():
                    break
                if self._writers.has_current() or self._readers.has_current():
                    raise StoreError(
                        "a thread of the disk store cannot wait for itself: it runs a callback that must not wait"
                    )
                changed = self._waiters.register()
            if started is None:
                started = time.perf_counter()
            changed.acquire(timeout=1.0)  # a thread that failed cannot always say so
        if started is None:
            return 0.0
        self.timeline.add(kind, started, nbytes, name)
        return time.perf_counter() - started
