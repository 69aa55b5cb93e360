"""How much memory the machine has left. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int | None:
    """What new programs can use now, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return _from_sysconf("SC_AVPHYS_PAGES")


def total_bytes() -> int | None:
    """All memory of the machine, or None where the system does not say."""
    return _from_sysconf("SC_PHYS_PAGES")


def _from_sysconf(name: str) -> int | None:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
