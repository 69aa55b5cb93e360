"""Say in an exception where in the chain it happened, and leave its type and traceback alone."""

from __future__ import annotations


def add_note(error: BaseException, text: str) -> None:
    """Add `text` to what is printed below the traceback (PEP 678, which Python 3.10 does not have)."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # traceback printers that know PEP 678 read this list
        error.__dict__.setdefault("__notes__", []).append(text)
