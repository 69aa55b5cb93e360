"""Parse and format sizes in bytes ("8 GiB") and times.

A float is not accepted as a size: torch reads a float as a ratio, other tools read it as GiB.
"""

from __future__ import annotations

import re

from ._errors import ArgumentError

_FACTORS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SMALLEST_INT_BUDGET = 2**20
"""Bytes. A smaller int was probably meant as GiB. Doubled: budgets of 1 to 2 MiB need a unit too."""
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")


def parse_bytes(size: str | int) -> int:
    """Return `size` in bytes. An int is a number of bytes; a string needs a unit.

    Raises `ArgumentError` if `size` is not positive or has no known unit.

    >>> parse_bytes("8 GiB"), parse_bytes("1.5kB"), parse_bytes(4096)
    (8589934592, 1500, 4096)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size <= 0:
            raise ArgumentError(f"a size in bytes must be positive, not {size}")
        return size
    if not isinstance(size, str):
        raise ArgumentError(
            f"a size must be an int (bytes) or a string with a unit such as '8 GiB', not {size!r}: "
            f"a bare {type(size).__name__} is ambiguous"
        )
    match = _PATTERN.fullmatch(size)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ArgumentError(
            f"{size!r} is not a size: write a number and a unit, one of B, kB, MB, GB, TB (powers of 1000) "
            "or KiB, MiB, GiB, TiB (powers of 1024), for example '8 GiB'"
        )
    whole, _, fraction = match.group(1).partition(".")
    # Integer arithmetic, so that '0.1 GB' is exactly 100,000,000 bytes.
    nbytes = int(whole + fraction) * factor // int(10 ** len(fraction))
    if nbytes <= 0:
        raise ArgumentError(f"{size!r} is 0 bytes: a size must be positive")
    return nbytes


def parse_budget(budget: str | int) -> int:
    """Return a memory budget in bytes. Like `parse_bytes`, but an int below 1 MiB is refused as a mistake.

    >>> parse_budget("8 GiB"), parse_budget("100 kB"), parse_budget(2**20)
    (8589934592, 100000, 1048576)
    """
    nbytes = parse_bytes(budget)
    if isinstance(budget, int) and nbytes < _SMALLEST_INT_BUDGET:
        raise ArgumentError(
            f"a budget of {budget} needs a unit: an int is a number of bytes, and {format_bytes(nbytes)} is probably "
            f"not meant. Write '{budget} GiB' or '{budget} MiB', or '{budget} B' if bytes are meant"
        )
    return nbytes


def format_budget(nbytes: int) -> str:
    """Return a budget with a unit, rounded up, so that `parse_budget` of the text is at least `nbytes`."""
    unit = next((unit for unit in ("tib", "gib", "mib", "kib") if nbytes >= _FACTORS[unit]), None)
    if unit is None:
        return f"{nbytes} B"
    hundredths = -(-100 * nbytes // _FACTORS[unit])
    return f"{hundredths // 100}.{hundredths % 100:02} {unit[0].upper()}iB"


def format_bytes(nbytes: float) -> str:
    """Return `nbytes` with a unit, in powers of 1024: '512 B', '1.50 MiB', '8.00 GiB'."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_time(seconds: float) -> str:
    """Return `seconds` with a unit: '1.50 s', '20.0 ms', '35 µs'."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
