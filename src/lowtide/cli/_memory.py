"""Total and available memory of the machine. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int | None:
    """Return the memory that new programs can use, or None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return _sysconf_bytes("SC_AVPHYS_PAGES")


def total_bytes() -> int | None:
    """Return the physical memory of the machine, or None if the system does not report it."""
    return _sysconf_bytes("SC_PHYS_PAGES")


def _sysconf_bytes(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
