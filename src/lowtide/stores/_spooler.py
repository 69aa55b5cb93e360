"""The moving parts of the disk store: what waits to be written, what is read ahead, and the bounds on both.

Guaranteed: never more than `max_in_flight_bytes` wait to be written and never more than `max_ahead_bytes`
are read ahead; a value's memory is held until it is written, and no longer; a value whose write fails stays
in memory. All tensors are made in the thread that calls, never in a background thread, so that whoever
counts memory there sees them. The threads hold this object and never the store, which can so be collected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from ._contract import StoreError, StoreStats
from ._geometry import bytes_of
from ._io_threads import IoThreads
from ._spill_file import SpillFile, Stopped, Written
from ._spooled_entry import Read, SpooledEntry, State


class Spooler:
    """Writes entries behind the caller's back, and reads them ahead of it."""

    def __init__(self, file: SpillFile, threads: int, max_in_flight_bytes: int, max_ahead_bytes: int) -> None:
        self.file = file
        self.max_in_flight_bytes = max_in_flight_bytes
        self.max_ahead_bytes = max_ahead_bytes
        self.closed = False
        self.mishap: str | None = None  # why the first write failed, until somebody has been told
        self._changed = threading.Condition(threading.Lock())
        self._entries: set[SpooledEntry] = set()
        self._wanted: dict[SpooledEntry, None] = {}  # in the order of the hints
        self._fetching = 0  # threads reading in `fetch`
        self._in_flight = self._peak_in_flight = self._ahead = self._peak_ahead = 0
        self._stored = self._kept = self._put = self._fetched = self._hits = self._fallbacks = 0
        self._put_wait = self._fetch_wait = 0.0
        # Two lanes, so that a read never stands behind writes.
        self._writers = IoThreads(threads, "lowtide-write")
        try:
            self._readers = IoThreads(threads, "lowtide-read")
        except BaseException:
            self._writers.stop()
            raise

    def put(self, entry: SpooledEntry) -> None:
        """Take `entry` in, once there is room. One that is larger than the bound is written before this returns."""
        nbytes = entry.nbytes
        waits = nbytes <= self.max_in_flight_bytes
        with self._changed:
            if waits:
                self._put_wait += self._wait(lambda: self._in_flight + nbytes <= self.max_in_flight_bytes)
                entry.in_flight = nbytes
                self._in_flight += nbytes
                self._peak_in_flight = max(self._peak_in_flight, self._in_flight)
            else:
                self._wait(lambda: True)
            self._entries.add(entry)
            self._put += nbytes
            self._stored += nbytes
        self._writers.submit(partial(self._write, entry))
        if not waits:
            with self._changed:
                self._put_wait += self._wait(lambda: entry.written is not None or entry.fell_back or entry.dropped)

    def fetch(self, entry: SpooledEntry) -> torch.Tensor:
        """The value in memory: what is still there, or was read ahead, or is read now."""
        with self._changed:
            self._check(entry)
            self._wanted.pop(entry, None)
            if entry.tensor is not None:
                self._fetched += entry.nbytes
                return entry.tensor
            read, entry.read = entry.read, None
            buffer, done = (None, False) if read is None else self._take(entry, read)
            if done:
                self._fetched += entry.nbytes
            else:
                self._check(entry)  # waiting lets others in
                entry.readers += 1
                self._fetching += 1
            written = entry.written
        if done:
            assert buffer is not None
            self._go_ahead()
            return buffer
        started = time.perf_counter()
        try:
            self._go_ahead()  # first, to be read while this one is
            # A prefetch that failed comes here too, and is told what is wrong if it still is.
            if buffer is None:
                buffer = entry.geometry.empty()
            assert written is not None
            self.file.read(written, bytes_of(buffer), entry)
        finally:
            with self._changed:
                self._fetch_wait += time.perf_counter() - started
                self._fetching -= 1
                self._reader_left(entry)
        with self._changed:
            self._fetched += entry.nbytes
        return buffer

    def prefetch(self, entry: SpooledEntry) -> None:
        """Read `entry` ahead as soon as there is room and its turn has come."""
        with self._changed:
            self._check(entry)
            if entry.read is not None or entry.fell_back or entry.nbytes > self.max_ahead_bytes:
                return
            self._wanted[entry] = None
        self._go_ahead()

    def drop(self, entry: SpooledEntry) -> None:
        """Forget `entry`; what a thread is busy with is given back when it is through."""
        with self._changed:
            if self.closed or entry not in self._entries:  # or its put was interrupted
                return
            entry.dropped = True
            self._entries.remove(entry)
            self._wanted.pop(entry, None)
            self._stored -= entry.nbytes
            if entry.fell_back:
                self._kept -= entry.nbytes
            entry.tensor = None
            if not entry.writing:
                self._in_flight -= entry.in_flight
                entry.in_flight = 0
            read, entry.read = entry.read, None
            if read is not None:
                if read.state is State.RUNNING:
                    read.abandoned = True
                else:
                    read.state = State.TAKEN
                    read.buffer = None
                    self._ahead -= entry.nbytes
            if entry.readers == 0:
                self._release(entry)
            self._changed.notify_all()
        if self._wanted and not self._readers.has_current():
            self._go_ahead()

    def forget(self, entry: SpooledEntry) -> None:
        """Drop `entry` soon, without a lock now."""
        if not self.closed:
            self._readers.submit(partial(self.drop, entry))

    def flush(self) -> None:
        """Wait until nothing is waiting to be written."""
        with self._changed:
            self._wait(lambda: self._in_flight == 0)

    def stats(self) -> StoreStats:
        """The counts, all of one moment."""
        with self._changed:
            return StoreStats(
                tier="disk",
                values=len(self._entries),
                stored_bytes=self._stored,
                resident_bytes=self._in_flight + self._ahead + self._kept,
                put_bytes=self._put,
                fetched_bytes=self._fetched,
                in_flight_bytes=self._in_flight,
                peak_in_flight_bytes=self._peak_in_flight,
                ahead_bytes=self._ahead,
                peak_ahead_bytes=self._peak_ahead,
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
        with self._changed:
            self._changed.notify_all()
        self._writers.join()
        self._readers.join()
        with self._changed:
            while self._fetching:
                self._changed.wait()
            for entry in self._entries:
                entry.dropped = True
                entry.tensor = entry.read = None
            self._entries.clear()
            self._wanted.clear()
            self._stored = self._kept = self._in_flight = self._ahead = 0
        self.file.close()

    def abandon(self) -> None:
        """Close the file in a forked child, where the threads are not and the locks may be held for ever."""
        self.closed = True
        self.file.close()

    def check_threads(self) -> None:
        """Raise what has escaped from a background thread."""
        failure = self._writers.failure or self._readers.failure
        if failure is not None:
            raise StoreError(
                f"a background thread of the disk store failed: {failure!r}. Please report this"
            ) from failure

    def _write(self, entry: SpooledEntry) -> None:
        with self._changed:
            tensor = entry.tensor
            if entry.dropped or self.closed or tensor is None:
                return
            entry.writing = True
        written: Written | None = None
        mishap: str | None = None
        try:
            written = self.file.write(bytes_of(tensor), stop=lambda: entry.dropped or self.closed)
        except Stopped:
            pass
        except BaseException as error:
            mishap = f"{type(error).__name__}: {error}"
        del tensor
        self._wrote(entry, written, mishap)

    def _wrote(self, entry: SpooledEntry, written: Written | None, mishap: str | None) -> None:
        with self._changed:
            entry.writing = False
            self._in_flight -= entry.in_flight
            entry.in_flight = 0
            entry.written = written
            if entry.dropped:
                self._release(entry)
            elif mishap is not None:
                entry.fell_back = True
                self._kept += entry.nbytes
                self._fallbacks += 1
                if self._fallbacks == 1:
                    self.mishap = mishap
            elif written is not None:
                entry.tensor = None
            self._changed.notify_all()

    def _go_ahead(self) -> None:
        """Begin the reads whose turn it is and for which there is room."""
        begun: list[tuple[SpooledEntry, Read]] = []
        with self._changed:
            for entry in self._wanted:
                if entry.written is None:
                    continue  # still in memory, which is as good
                if self._ahead + entry.nbytes > self.max_ahead_bytes:
                    break
                self._ahead += entry.nbytes
                self._peak_ahead = max(self._peak_ahead, self._ahead)
                entry.read = Read()
                begun.append((entry, entry.read))
            for entry, _ in begun:
                del self._wanted[entry]
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
            with self._changed:
                if read.state is not State.QUEUED:
                    continue
                read.buffer = buffer
            self._readers.submit(partial(self._read_ahead, entry, read))

    def _give_up(self, begun: list[tuple[SpooledEntry, Read]]) -> None:
        """Let the reads be that nobody has taken over."""
        with self._changed:
            for entry, read in begun:
                if read.state is State.QUEUED:
                    read.state = State.TAKEN
                    entry.read = None
                    self._ahead -= entry.nbytes

    def _take(self, entry: SpooledEntry, read: Read) -> tuple[torch.Tensor | None, bool]:
        """The buffer of a prefetch, and whether it is filled: it is waited for if a thread is at it."""
        if read.state is State.QUEUED:
            read.state = State.TAKEN
        try:
            self._fetch_wait += self._wait(lambda: read.state is not State.RUNNING)
        except BaseException:
            if read.state is State.RUNNING:
                read.abandoned = True
            else:
                self._ahead -= entry.nbytes
            raise
        self._ahead -= entry.nbytes
        done = read.state is State.DONE
        self._hits += done
        buffer, read.buffer = read.buffer, None  # a job that comes too late must not hold it
        return buffer, done

    def _read_ahead(self, entry: SpooledEntry, read: Read) -> None:
        with self._changed:
            if read.state is not State.QUEUED or self.closed:
                return
            read.state = State.RUNNING
            buffer, written = read.buffer, entry.written
            entry.readers += 1
        state = State.FAILED
        try:
            assert buffer is not None
            assert written is not None
            self.file.read(written, bytes_of(buffer), entry)
            state = State.DONE
        except (StoreError, MemoryError):
            pass  # whoever fetches reads again, and gets the error
        finally:
            del buffer
            with self._changed:
                read.state = state
                if read.abandoned or state is State.FAILED:
                    read.buffer = None
                if read.abandoned:
                    self._ahead -= entry.nbytes
                self._reader_left(entry)

    def _reader_left(self, entry: SpooledEntry) -> None:
        entry.readers -= 1
        if entry.dropped and entry.readers == 0:
            self._release(entry)
        self._changed.notify_all()

    def _release(self, entry: SpooledEntry) -> None:
        """Have the room on the disk given back, by a writer: before the next write, and not in the caller's time."""
        written, entry.written = entry.written, None
        if written is not None and not self.closed:
            self._writers.submit(partial(self.file.free, written.extent))

    def _check(self, entry: SpooledEntry) -> None:
        if self.closed or entry.dropped:
            raise StoreError(f"{entry} was dropped, or its store closed, by another thread while it was used")

    def _wait(self, ready: Callable[[], bool]) -> float:
        """Wait until `ready`, with the lock; how many seconds that took."""
        if ready() and not self.closed:
            return 0.0
        started = time.perf_counter()
        while True:
            if self.closed:
                raise StoreError("the disk store was closed by another thread while this one waited for it")
            self.check_threads()
            if ready():
                return time.perf_counter() - started
            self._changed.wait(1.0)  # a thread that failed cannot always say so
