"""HiGHS has a line or two that it prints to standard output whatever it is told.

Standard output belongs to the user's script, or is JSON that somebody reads: so while HiGHS runs, what is
written there below Python goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

_redirecting = threading.Lock()


@contextlib.contextmanager
def to_standard_error() -> Iterator[None]:
    """Send file descriptor 1 to where 2 goes, for the length of the body."""
    if not _redirecting.acquire(blocking=False):
        yield  # another thread does it
        return
    try:
        saved = _saved_output()
        try:
            yield
        finally:
            if saved is not None:
                _flush()
                os.dup2(saved, 1)
                os.close(saved)
    finally:
        _redirecting.release()


def _saved_output() -> int | None:
    """A copy of file descriptor 1, which leads to standard error now; None in a process that has not both."""
    _flush()
    try:
        saved = os.dup(1)
    except OSError:
        return None
    try:
        os.dup2(2, 1)
    except OSError:
        os.close(saved)
        return None
    return saved


def _flush() -> None:
    """Have Python and the C library write what they have of standard output to where it leads now."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced by something else
        sys.stdout.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not every system has it under this name
        ctypes.CDLL(None).fflush(None)
