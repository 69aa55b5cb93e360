"""Stores by name: `stores=("disk",)`, or stores of one's own: `stores=(DiskStore("/scratch"),)`.

"device" is where values are anyway. A store asked for by name is made once a process, and closed with it.
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
    """The store that evicted values may be put into, the first that is named; None where there is only the device.

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


def _named(name: str) -> Store | None:
    if name == "device":
        return None
    return _disk() if name == "disk" else _host()


@functools.cache
def _disk() -> DiskStore:
    return DiskStore()


@functools.cache
def _host() -> HostStore:
    return HostStore()
