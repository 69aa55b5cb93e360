"""Redirection of standard output while the solver runs.

HiGHS prints a few lines to standard output even when its output is disabled. Standard output belongs to the user's
script, and may be JSON that another program parses. Everything that is written to it below Python therefore goes to
standard error while HiGHS runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

_redirection_lock = threading.Lock()


@contextlib.contextmanager
def to_standard_error() -> Iterator[None]:
    """Redirect file descriptor 1 to standard error inside the `with` block.

    Does nothing if another thread has redirected it, or if the process has no standard output or no standard error.
    """
    if not _redirection_lock.acquire(blocking=False):
        yield
        return
    try:
        original = _redirect()
        try:
            yield
        finally:
            if original is not None:
                _flush()
                os.dup2(original, 1)
                os.close(original)
    finally:
        _redirection_lock.release()


def _redirect() -> int | None:
    """Redirect file descriptor 1. Return a duplicate of the original one, or None if that failed."""
    _flush()
    try:
        original = os.dup(1)
    except OSError:
        return None
    try:
        os.dup2(2, 1)
    except OSError:
        os.close(original)
        return None
    return original


def _flush() -> None:
    """Flush the standard output buffers of Python and of the C library."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by another object
        sys.stdout.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # some systems have no fflush under this name
        ctypes.CDLL(None).fflush(None)
