"""Stores for offloaded values, one tier per file, all with the `Store` interface.

`DeviceStore` keeps values in place, `HostStore` in pinned host memory, `DiskStore` in a private spill file.
`MemoryDouble` is for tests. Stores hold tensors and do not depend on plans.
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
