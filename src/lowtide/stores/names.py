"""Stores by name, as in `stores=("disk",)`, or as objects: `stores=(DiskStore("/scratch"),)`.

"device" means no offloading. The caller owns the stores that are created for names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._errors import ArgumentError
from ._base import Store
from .device import DeviceStore
from .disk import DiskStore
from .host import HostStore

NAMES = ("device", "host", "disk")


def resolve(stores: str | Store | Sequence[str | Store] | None, store_named: Callable[[str], Store]) -> Store | None:
    """Return the first store other than "device", or None if there is none.

    `store_named` returns the store for "host" or "disk".

    >>> resolve(("device",), create) is None
    True
    """
    if stores is None:
        return None
    listed = [stores] if isinstance(stores, (str, Store)) else list(stores)
    found = None
    for item in listed:
        if isinstance(item, Store):
            store: Store | None = None if type(item) is DeviceStore else item
        elif item in NAMES:
            store = None if item == "device" else store_named(item)
        else:
            raise ArgumentError(
                f"{item!r} is not a store: stores are {', '.join(map(repr, NAMES))}, "
                "or objects such as lowtide.stores.DiskStore(directory)"
            )
        found = found or store
    return found


def create(name: str) -> Store:
    """Return a new store for "host" or "disk"."""
    return DiskStore() if name == "disk" else HostStore()
