"""Notes on exceptions: the position in the chain, without changing type or traceback."""

from __future__ import annotations


def add_note(error: BaseException, text: str) -> None:
    """Add a line below the traceback of `error` (PEP 678). Python 3.10 does not have `add_note`."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # pytest and other traceback printers read this list
        error.__dict__.setdefault("__notes__", []).append(text)
