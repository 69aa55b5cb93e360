"""Count the live and peak bytes of torch's CPU allocator, workspace of kernels included.

The allocator is a small C++ library (`counting_allocator.cpp`), built once into the cache directory of pytest. It is
installed by the first call and stays for the rest of the process. Memory that was allocated before is not counted, so
call `live_bytes()` before you make a model if its parameters should count.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path

from torch.utils import cpp_extension

_SOURCE = Path(__file__).with_name("counting_allocator.cpp")
_CACHE = Path(__file__).parents[2] / ".pytest_cache" / "allocator"


class AllocatorPeak:
    """The peak of one block. `peak_bytes` may be read inside the block too."""

    def __init__(self) -> None:
        self.start_bytes = live_bytes()
        """Counted bytes at the start of the block."""
        self._peak_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """Highest counted bytes inside the block, including those that were live before."""
        return _library().counted_peak_bytes() if self._peak_bytes is None else self._peak_bytes

    @property
    def rise_bytes(self) -> int:
        """Highest counted bytes above those at the start."""
        return self.peak_bytes - self.start_bytes

    def end(self) -> None:
        """The block has ended."""
        self._peak_bytes = self.peak_bytes


@contextlib.contextmanager
def allocator_peak() -> Iterator[AllocatorPeak]:
    """Measure the peak inside the block, for all threads. Blocks must not be nested."""
    _library().reset_counted_peak()
    peak = AllocatorPeak()
    try:
        yield peak
    finally:
        peak.end()


def live_bytes() -> int:
    """Return the bytes that were allocated since counting began and are not freed."""
    return _library().counted_live_bytes()


@functools.cache  # the library is built and installed once a process
def _library() -> ctypes.CDLL:
    _CACHE.mkdir(parents=True, exist_ok=True)
    path = cpp_extension.load(
        "counting_allocator", str(_SOURCE), build_directory=str(_CACHE), is_python_module=False, extra_cflags=["-O2"]
    )
    library = ctypes.CDLL(str(path))
    library.counted_live_bytes.restype = library.counted_peak_bytes.restype = ctypes.c_int64
    library.count_from_now()
    return library
