"""Stores that values are offloaded to: one tier a file, all with the `Store` interface.

DeviceStore holds them where they are, HostStore in pinned host memory, DiskStore in a private spill file;
MemoryDouble is for tests. They store tensors and know nothing of plans.
"""

from __future__ import annotations

from .._errors import DamagedValueError, StoreError
from ._base import Store, StoreStats, Ticket
from ._timeline import Span
from .device import DeviceStore
from .disk import DiskStore
from .host import HostStore
from .memory_double import MemoryDouble

__all__ = [
    "DamagedValueError",
    "DeviceStore",
    "DiskStore",
    "HostStore",
    "MemoryDouble",
    "Span",
    "Store",
    "StoreError",
    "StoreStats",
    "Ticket",
]
