"""The disk tier: rows of bytes in one private, unnamed scratch file.

The file is made with mode 0600 and has no name from the moment it is open where the operating system allows
that (elsewhere it is removed when it is closed), so nothing stays behind, not even after a crash. Raw bytes
are written, never pickles. Space that is given back is used again, and a full disk raises `DiskFullError`
with everything stored before still intact. It does not survive the process and is not meant to.
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

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Extent(NamedTuple):
    """Where in the file some bytes are."""

    start: int
    length: int


class ScratchFile:
    """Bytes in, bytes out. Not safe under threads: its store has the lock."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directory = os.fspath(directory) if directory is not None else tempfile.gettempdir()
        try:
            # Closed by `close`, at the latest when the store is collected.
            self._file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ArgumentError(
                f"the disk tier cannot write in {self.directory!r} ({error.strerror}): "
                "pass directory=, a directory on a local disk"
            ) from error
        self._holes: list[Extent] = []  # in order, none empty, none touching another
        self._end = 0
        self.close = weakref.finalize(self, self._file.close)

    def write(self, data: Bytes) -> Extent:
        """Put `data` somewhere."""
        if self._file.closed:
            raise ArgumentError("this store is closed: make a new one")
        extent = self._reserve(data.nbytes)
        try:
            self._file.seek(extent.start)
            rest = data.data
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except BaseException as error:
            self.free(extent)
            if isinstance(error, OSError) and error.errno in _FULL:
                raise DiskFullError(error.errno, self._full(extent.length)) from error
            raise
        return extent

    def read(self, extent: Extent) -> Bytes:
        """A new buffer with the bytes of `extent`."""
        data = np.empty(extent.length, dtype=np.uint8)
        self._file.seek(extent.start)
        rest = data.data
        while rest:
            got = self._file.readinto(rest)
            if not got:
                raise OSError(errno.EIO, f"the scratch file in {self.directory} has lost what was written")
            rest = rest[got:]
        return data

    def free(self, extent: Extent) -> None:
        """Give the space of `extent` back."""
        if extent.length == 0:
            return
        start, stop = extent.start, extent.start + extent.length
        apart = []
        for hole in self._holes:
            if hole.start + hole.length == start:
                start = hole.start
            elif hole.start == stop:
                stop = hole.start + hole.length
            else:
                apart.append(hole)
        if stop == self._end:
            self._end = start
            self._file.truncate(start)
        else:
            apart.append(Extent(start, stop - start))
            apart.sort()
        self._holes = apart

    @property
    def file_bytes(self) -> int:
        """The length of the file, holes included."""
        return self._end

    def _reserve(self, length: int) -> Extent:
        """The smallest hole that fits, or the end of the file."""
        fitting = [hole for hole in self._holes if hole.length >= length]
        if not fitting or length == 0:
            extent = Extent(self._end, length)
            self._end += length
            return extent
        hole = min(fitting, key=lambda h: (h.length, h.start))
        self._holes.remove(hole)
        if hole.length > length:
            self._holes.append(Extent(hole.start + length, hole.length - length))
            self._holes.sort()
        return Extent(hole.start, length)

    def _full(self, length: int) -> str:
        free = shutil.disk_usage(self.directory).free
        return (
            f"no room for {format_bytes(length)} more in {self.directory}, where {format_bytes(self._end)} "
            f"are held and {format_bytes(free)} are free; nothing that was stored is lost. Pass directory= on "
            "a larger disk, fewer slots, or a narrower precision"
        )
