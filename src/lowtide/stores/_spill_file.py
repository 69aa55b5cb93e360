"""Private file for offloaded values, with a checksum for each block. Thread-safe.

The file is readable by its owner only and has no name, so it disappears with the process, however the process
ends. Each value has one extent, which starts at a multiple of `ALIGNMENT`. Freed extents are reused; free space
at the end of the file is returned to the disk. Each block of `BLOCK` bytes has a CRC-32, which detects one or
two flipped bits and any burst of up to 32 bits for certain, and other damage with probability 1 - 2^-32. The
checksum does not protect against deliberate changes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import weakref
import zlib
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

from .._errors import ArgumentError, DamagedValueError, StoreError
from ._geometry import Bytes

ALIGNMENT = 4096
BLOCK = 1 << 20  # small enough to stay in the CPU cache between checksum and write

_REMEDY = "No wrong value was returned. Run the step again, and use another disk if this repeats"


def checksum(block: Bytes) -> int:
    """Return the CRC-32 of a block. Releases the GIL."""
    return zlib.crc32(block.data)


class Stopped(Exception):  # noqa: N818 - not an error
    """A write was cancelled because its value was dropped or the store closed."""


class Extent(NamedTuple):
    """Byte range in the file."""

    start: int
    length: int


class Written(NamedTuple):
    """Position of a value in the file, and the checksum of each block."""

    extent: Extent
    checksums: tuple[int, ...]


class Extents:
    """Free-space list of a file: allocates the smallest hole that fits, else at the end. Adjacent holes are merged."""

    def __init__(self) -> None:
        self.end = 0
        self._by_size: list[tuple[int, int]] = []  # (length, start)
        self._by_start: dict[int, int] = {}  # start → length
        self._by_stop: dict[int, int] = {}  # stop → start

    def reserve(self, nbytes: int) -> Extent:
        """Allocate `nbytes`, rounded up to a multiple of `ALIGNMENT`."""
        length = -(-nbytes // ALIGNMENT) * ALIGNMENT
        at = bisect_left(self._by_size, (length, 0))
        if at == len(self._by_size):
            self.end += length
            return Extent(self.end - length, length)
        found, start = self._by_size[at]
        self._remove(start)
        if found > length:
            self._add(start + length, found - length)
        return Extent(start, length)

    def free(self, extent: Extent) -> bool:
        """Free an extent. Return whether the end of the file moved."""
        start, stop = extent.start, extent.start + extent.length
        if start == stop:
            return False
        before = self._by_stop.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if stop in self._by_start:
            after = self._by_start[stop]
            self._remove(stop)
            stop += after
        if stop == self.end:
            self.end = start
            return True
        self._add(start, stop - start)
        return False

    @property
    def holes(self) -> list[Extent]:
        """Free extents before the end, in order."""
        return sorted(Extent(start, length) for start, length in self._by_start.items())

    def _add(self, start: int, length: int) -> None:
        insort(self._by_size, (length, start))
        self._by_start[start] = length
        self._by_stop[start + length] = start

    def _remove(self, start: int) -> None:
        length = self._by_start.pop(start)
        del self._by_stop[start + length]
        del self._by_size[bisect_left(self._by_size, (length, start))]


class SpillFile:
    """Unnamed temporary file that stores values in extents."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        if not hasattr(os, "preadv"):
            raise ArgumentError("the disk store needs os.preadv, which this system does not have: use another store")
        self.directory = os.fspath(directory) if directory is not None else tempfile.gettempdir()
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            # Mode 0600. Created without a name (O_TMPFILE) if the system can, else unlinked immediately.
            file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ArgumentError(
                f"the disk store cannot write in {self.directory!r} ({error.strerror}): "
                "pass directory=, a directory of your own on a local disk"
            ) from error
        self.fd = file.fileno()
        self.lock = threading.Lock()
        self._extents = Extents()
        self.close = weakref.finalize(self, file.close)
        self.close.atexit = False  # the store stops its threads first; process exit closes the file

    @property
    def file_bytes(self) -> int:
        """Length of the file, including holes."""
        return self._extents.end

    def write(self, data: Bytes, stop: Callable[[], bool]) -> Written:
        """Write `data` to a new extent. Raise `Stopped` if `stop` returns True between two blocks."""
        with self.lock:
            extent = self._extents.reserve(data.nbytes)
        checksums = []
        try:
            for offset in range(0, data.nbytes, BLOCK):
                if stop():
                    raise Stopped
                block = data[offset : offset + BLOCK]
                checksums.append(checksum(block))
                rest, place = block.data, extent.start + offset
                while rest:
                    count = os.pwritev(self.fd, [rest], place)
                    if count == 0:
                        raise OSError(errno.EIO, "the disk wrote 0 bytes")
                    place += count
                    rest = rest[count:]
        except BaseException:
            self.free(extent)
            raise
        return Written(extent, tuple(checksums))

    def read(self, written: Written, into: Bytes, label: object) -> None:
        """Read a value into `into` and check its checksums. `label` names the value in errors."""
        start = written.extent.start
        for number, expected in enumerate(written.checksums):
            offset = number * BLOCK
            block = into[offset : offset + BLOCK]
            rest, place = block.data, start + offset
            while rest:
                try:
                    count = os.preadv(self.fd, [rest], place)
                except OSError as error:
                    raise StoreError(
                        f"{label} cannot be read back from the spill file in {self.directory} ({error.strerror}, "
                        f"at byte {place}). {_REMEDY}"
                    ) from error
                if count == 0:
                    raise self._damaged_error(label, number, written, "the file ends before it")
                place += count
                rest = rest[count:]
            found = checksum(block)
            if found != expected:
                raise self._damaged_error(label, number, written, f"its checksum is {found:08x}, not {expected:08x}")

    def free(self, extent: Extent) -> None:
        """Free an extent. Truncate the file if its end is free."""
        with self.lock:
            # `write` reserves under the same lock, so no extent is beyond the new end.
            if self._extents.free(extent):
                with contextlib.suppress(OSError):  # a file that is too long does no harm
                    os.ftruncate(self.fd, self._extents.end)

    def _damaged_error(self, label: object, number: int, written: Written, damage: str) -> DamagedValueError:
        return DamagedValueError(
            f"{label} is damaged: block {number + 1} of {len(written.checksums)}, at byte "
            f"{written.extent.start + number * BLOCK} of the spill file in {self.directory}: {damage}. {_REMEDY}"
        )
