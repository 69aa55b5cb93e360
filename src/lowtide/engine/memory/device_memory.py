"""The memory of one device, shared by all scopes: live bytes, evictable values, a lock."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch

from ..._errors import StoreError
from ...stores import Store
from ...stores.speed import TransferCosts, measure_store, measure_transfer_costs
from .eviction import Pace, Pool
from .ledger import Ledger
from .workspaces import Workspaces

_RECOUNT_SHARE = 0.005
"""Share of a thread's processor time for counting all tensors. Doubled: new tensors are found twice as soon."""


class DeviceMemory:
    """Live bytes, evictable values and the workspace of ops of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ledger = Ledger(device)
        self.pool = Pool()
        self.workspaces = Workspaces(device)
        self.reproduced: dict[Any, float] = {}
        """Signatures of ops whose replay gave the same bits, and its kernel time in microseconds."""
        self.lock = threading.RLock()  # scopes evict each other's values
        self._paces: weakref.WeakKeyDictionary[Store, Pace] = weakref.WeakKeyDictionary()
        self._transfer_costs: weakref.WeakKeyDictionary[Store, TransferCosts] = weakref.WeakKeyDictionary()
        self._recounted = threading.local()

    def recount(self, *, always: bool = False) -> None:
        """Count all tensors that Python knows, unless that was done recently.

        In between, a tensor is counted when an op makes or reads it, when its model runs, or after an optimizer step.
        """
        start = time.thread_time()
        if always or start >= getattr(self._recounted, "next_s", 0.0):
            self.ledger.count_everything()
            end = time.thread_time()
            self._recounted.next_s = end + (end - start) / _RECOUNT_SHARE

    def pace_of(self, store: Store) -> Pace | None:
        """Return the speed of a store, measured once. None while it cannot be written; the store has warned then."""
        pace = self._paces.get(store)
        if pace is None:
            try:
                pace = self._paces[store] = Pace(measure_store(store, nbytes=8 * 2**20))
            except StoreError:
                if store.closed:
                    raise
        return pace

    def transfer_costs_of(self, store: Store) -> TransferCosts | None:
        """Return the cost of moving values to a store and back, measured once. None while it cannot be written."""
        costs = self._transfer_costs.get(store)
        if costs is None:
            try:
                costs = self._transfer_costs[store] = measure_transfer_costs(store)
            except StoreError:
                if store.closed:
                    raise
        return costs

    def set_store_costs(self, store: Store, pace: Pace, costs: TransferCosts | None = None) -> None:
        """Use known speeds instead of measuring."""
        self._paces[store] = pace
        if costs is not None:
            self._transfer_costs[store] = costs


def default_device() -> torch.device:
    """Return the device that a budget applies to by default: the accelerator if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())
