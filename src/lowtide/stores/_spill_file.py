"""One private file of blocks: bytes in, the same bytes out, or an error.

The file is readable by its owner only and has no name from the moment it is open, so it is gone with the
process, however that ends. Every value lies in one extent that begins at a multiple of `ALIGNMENT`; space given
back is used again, and at the end of the file it is returned to the disk. Every block of `BLOCK` bytes has
a CRC-32: one or two flipped bits in a block, or any damage within 32 bits of it, are found for certain, anything
else but once in 2^32; it is no defence against somebody who means it. Safe under threads.
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
BLOCK = 1 << 20  # what is checksummed is still in the cache when it is written

_REMEDY = "Nothing wrong was handed out; run the step again, on another disk if this repeats"


def checksum(block: Bytes) -> int:
    """The CRC-32 of a block. Runs without the interpreter's lock."""
    return zlib.crc32(block.data)


class Stopped(Exception):  # noqa: N818 - a wish, not an error
    """A write was given up because nobody wants it any more."""


class Extent(NamedTuple):
    """A part of the file."""

    start: int
    length: int


class Written(NamedTuple):
    """Where some bytes are, and the checksum of each block."""

    extent: Extent
    checksums: tuple[int, ...]


class Extents:
    """Which parts of a file are in use: the smallest hole that fits, else the end. Holes that touch become one."""

    def __init__(self) -> None:
        self.end = 0
        self._by_size: list[tuple[int, int]] = []  # (length, start)
        self._by_start: dict[int, int] = {}  # start → length
        self._by_stop: dict[int, int] = {}  # stop → start

    def reserve(self, nbytes: int) -> Extent:
        """Room for `nbytes`, rounded up to whole multiples of `ALIGNMENT`."""
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
        """Give room back; whether the file may be shorter now."""
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
        """The parts not in use, in order."""
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
    """The file, and who has which part of it."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        if not hasattr(os, "preadv"):
            raise ArgumentError("the disk store needs a POSIX system (os.preadv): use another store")
        self.directory = os.fspath(directory) if directory is not None else tempfile.gettempdir()
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            # Made with mode 0600, and without a name where the system can (O_TMPFILE), else unlinked at once.
            file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ArgumentError(
                f"the disk store cannot write in {self.directory!r} ({error.strerror}): "
                "pass directory=, a directory of your own on a local disk"
            ) from error
        self.fd = file.fileno()
        self._lock = threading.Lock()
        self._extents = Extents()
        self.close = weakref.finalize(self, file.close)
        self.close.atexit = False  # the threads end first; then the process closes it anyway

    @property
    def file_bytes(self) -> int:
        """How long the file is, holes included."""
        return self._extents.end

    def write(self, data: Bytes, stop: Callable[[], bool]) -> Written:
        """Put `data` somewhere; between blocks, `stop` can end it."""
        with self._lock:
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
                        raise OSError(errno.EIO, "the disk took nothing of a write")
                    place += count
                    rest = rest[count:]
        except BaseException:
            self.free(extent)
            raise
        return Written(extent, tuple(checksums))

    def read(self, written: Written, into: Bytes, what: object) -> None:
        """Fill `into` with what was written; `what` names it in errors."""
        start = written.extent.start
        for number, wanted in enumerate(written.checksums):
            offset = number * BLOCK
            block = into[offset : offset + BLOCK]
            rest, place = block.data, start + offset
            while rest:
                try:
                    count = os.preadv(self.fd, [rest], place)
                except OSError as error:
                    raise StoreError(
                        f"{what} cannot be read back from the spill file in {self.directory} ({error.strerror}, "
                        f"at byte {place}). {_REMEDY}"
                    ) from error
                if count == 0:
                    raise self._damaged(what, number, written, "the file ends before it")
                place += count
                rest = rest[count:]
            found = checksum(block)
            if found != wanted:
                raise self._damaged(what, number, written, f"its checksum is {found:08x}, not {wanted:08x}")

    def free(self, extent: Extent) -> None:
        """Give room back. The end of the file goes back to the disk, unwritten if it had not got there yet."""
        with self._lock:
            # Whoever reserves has the lock too, so nothing beyond the new end is anybody's.
            if self._extents.free(extent):
                with contextlib.suppress(OSError):  # a file too long is only that
                    os.ftruncate(self.fd, self._extents.end)

    def _damaged(self, what: object, number: int, written: Written, how: str) -> DamagedValueError:
        return DamagedValueError(
            f"{what} is damaged: block {number + 1} of {len(written.checksums)}, at byte "
            f"{written.extent.start + number * BLOCK} of the spill file in {self.directory}: {how}. {_REMEDY}"
        )
