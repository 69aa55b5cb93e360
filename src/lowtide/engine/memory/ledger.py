"""The ledger: live tensor bytes of one device, and their peak.

Each storage is one row, even if several tensors share it. The row is removed when the storage is freed, in any
thread. A tensor is counted once it is passed to `count`. Workspace that a kernel allocates inside an op is not counted.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from ...torch_compat import memory_of, modules_of, own_buffers, own_parameters, storage_key


class Row(weakref.ref[torch.UntypedStorage]):
    """A storage and its counted bytes."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class Ledger:
    """Bytes of live storages on one device, or on all devices if `device` is None."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.peak_bytes = 0
        self._live = 0
        self.rows: dict[int, Row] = {}  # by storage key
        # A storage may be freed while the lock is held, so its row only queues the bytes to subtract.
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()
        rows, freed = self.rows, self._freed

        def storage_freed(row: Any) -> None:
            if rows.pop(row.key, None) is not None:
                freed.append(row.nbytes)

        self._storage_freed = storage_freed

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        if self._freed:
            with self._lock:
                self._subtract_freed()
        return self._live

    def count(self, tensor: torch.Tensor) -> None:
        """Count the memory of `tensor`, unless it is counted already or belongs to another device.

        A sparse tensor and a wrapper subclass have several storages. Meta tensors have no memory.
        """
        try:
            storage = tensor.untyped_storage()
            row = self.rows.get(storage_key(storage))
            if row is not None and row.nbytes == storage.nbytes():
                return
            if type(tensor) is torch.Tensor and storage.data_ptr():  # the common case: a dense tensor with memory
                self._count_storage(storage, row)
                return
        except (NotImplementedError, RuntimeError, ValueError):  # sparse, a wrapper, or an uninitialised parameter
            pass
        for storage in memory_of(tensor):
            self._count_storage(storage, self.rows.get(storage_key(storage)))

    def _count_storage(self, storage: torch.UntypedStorage, row: Row | None) -> None:
        if self.device is not None and storage.device != self.device:
            return
        nbytes = storage.nbytes()
        with self._lock:
            self._subtract_freed()
            if row is None:
                row = Row(storage, self._storage_freed)
                row.key, row.nbytes = storage_key(storage), 0
                self.rows[row.key] = row
            self._live += nbytes - row.nbytes  # new, or resized since
            row.nbytes = nbytes
            if self._live > self.peak_bytes:
                self.peak_bytes = self._live

    def count_all(self, items: Iterable[Any]) -> None:
        """Count the tensors among arguments or results, also inside lists."""
        for item in items:
            if isinstance(item, torch.Tensor):
                self.count(item)
            elif type(item) is list or type(item) is tuple:
                self.count_all(item)

    def count_module(self, module: torch.nn.Module) -> None:
        """Count the parameters, gradients and buffers of a model."""
        for part in modules_of(module):
            for parameter in own_parameters(part):
                self.count(parameter)
                if parameter.is_leaf and parameter.grad is not None:
                    self.count(parameter.grad)
            for buffer in own_buffers(part):
                self.count(buffer)

    def count_everything(self) -> None:
        """Count every tensor that Python knows: parameters, optimizer state, data. Takes tens of milliseconds."""
        self._count_tensors(gc.get_objects())

    def count_recent(self) -> None:
        """Count the tensors that were made recently: those of the young generations of garbage collection."""
        for generation in (0, 1):
            self._count_tensors(gc.get_objects(generation))

    def _count_tensors(self, items: list[Any]) -> None:
        # `isinstance` would call `__class__` of foreign objects. There are few types, so each is checked once.
        kinds = {kind for kind in set(map(type, items)) if issubclass(kind, torch.Tensor)}
        for item in [item for item in items if type(item) in kinds]:
            self.count(item)
            try:
                gradient = item.grad if item.is_leaf else None
            except RuntimeError:  # torch refuses to say for some views whose base was modified in place
                continue
            if gradient is not None:
                self.count(gradient)

    def start_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak_bytes = self.live_bytes

    def _subtract_freed(self) -> None:
        freed = self._freed
        while freed:
            self._live -= freed.popleft()
