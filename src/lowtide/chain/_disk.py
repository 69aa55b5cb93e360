"""The disk tier: raw bytes in one private scratch file.

The file has mode 0600 and no name, so the operating system deletes it when the process ends, also after a
crash. Systems without unnamed files delete it on close. Freed space is reused. A full disk raises
`DiskFullError` and leaves stored data intact.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from typing import NamedTuple

import numpy as np

from .._errors import ArgumentError, DiskFullError
from .._units import format_bytes
from ._arrays import Bytes

_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Extent(NamedTuple):
    """A range of bytes in the file."""

    start: int
    length: int


class ScratchFile:
    """Write, read and free ranges of bytes. Not thread-safe: the store holds the lock."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = os.fspath(directory) if directory is not None else tempfile.gettempdir()
        try:
            # The finalizer below closes the file.
            self.file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ArgumentError(
                f"the disk tier cannot write in {self.directory!r} ({error.strerror}): "
                "pass directory=, a directory on a local disk"
            ) from error
        self._free_extents: list[Extent] = []  # sorted, not empty, not adjacent
        self._end = 0
        self.close = weakref.finalize(self, self.file.close)

    def write(self, data: Bytes) -> Extent:
        """Write `data` to free space and return its extent."""
        if self.file.closed:
            raise ArgumentError("this store is closed: create a new one")
        extent = self._reserve(data.nbytes)
        try:
            self.file.seek(extent.start)
            rest = data.data
            while rest:
                rest = rest[self.file.write(rest) or 0 :]
        except BaseException as error:
            self.free(extent)
            if isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS:
                raise DiskFullError(error.errno, self._disk_full_message(extent.length)) from error
            raise
        return extent

    def read(self, extent: Extent) -> Bytes:
        """Return a new buffer with the bytes of `extent`."""
        data = np.empty(extent.length, dtype=np.uint8)
        self.file.seek(extent.start)
        rest = data.data
        while rest:
            got = self.file.readinto(rest)
            if not got:
                raise OSError(errno.EIO, f"the scratch file in {self.directory} is shorter than the data written to it")
            rest = rest[got:]
        return data

    def free(self, extent: Extent) -> None:
        """Make the space of `extent` available again."""
        if extent.length == 0:
            return
        start, stop = extent.start, extent.start + extent.length
        separate = []
        for other in self._free_extents:
            if other.start + other.length == start:
                start = other.start
            elif other.start == stop:
                stop = other.start + other.length
            else:
                separate.append(other)
        if stop == self._end:
            self._end = start
            self.file.truncate(start)
        else:
            separate.append(Extent(start, stop - start))
            separate.sort()
        self._free_extents = separate

    @property
    def file_bytes(self) -> int:
        """The length of the file, including free extents."""
        return self._end

    @property
    def free_bytes(self) -> int:
        """Bytes of the file that hold no data."""
        return sum(extent.length for extent in self._free_extents)

    def _reserve(self, length: int) -> Extent:
        """Return the start of the smallest free extent that fits, else the end of the file."""
        fitting = [extent for extent in self._free_extents if extent.length >= length]
        if not fitting or length == 0:
            extent = Extent(self._end, length)
            self._end += length
            return extent
        best = min(fitting, key=lambda extent: (extent.length, extent.start))
        self._free_extents.remove(best)
        if best.length > length:
            self._free_extents.append(Extent(best.start + length, best.length - length))
            self._free_extents.sort()
        return Extent(best.start, length)

    def _disk_full_message(self, length: int) -> str:
        free = shutil.disk_usage(self.directory).free
        return (
            f"no space for {format_bytes(length)} more in {self.directory}: the scratch file has "
            f"{format_bytes(self._end)} and the disk {format_bytes(free)} free. Stored data is intact. "
            "Pass directory= on a larger disk, fewer slots, or a narrower precision"
        )
