"""Stores by name, as in `stores=("disk",)`, or as objects: `stores=(DiskStore("/scratch"),)`.

"device" means no offloading. A named store is created once per process and closed on exit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from .._errors import ArgumentError
from ._base import Store
from .device import DeviceStore
from .disk import DiskStore
from .host import HostStore

NAMES = ("device", "host", "disk")


def resolve(stores: str | Store | Sequence[str | Store] | None) -> Store | None:
    """Return the first store other than "device", or None if there is none.

    >>> resolve(("device",)) is None
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
            store = _named(item)
        else:
            raise ArgumentError(
                f"{item!r} is not a store: stores are {', '.join(map(repr, NAMES))}, "
                "or objects such as lowtide.stores.DiskStore(directory)"
            )
        found = found or store
    return found


@functools.cache
def _named(name: str) -> Store | None:
    if name == "device":
        return None
    return DiskStore() if name == "disk" else HostStore()
