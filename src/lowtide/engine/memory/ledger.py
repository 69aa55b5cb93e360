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

from ...torch_compat import storage_key


class _Row(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class Ledger:
    """Bytes of live storages on one device, or on all devices if `device` is None."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.peak_bytes = 0
        self._live = 0
        self.rows: dict[int, _Row] = {}  # by storage key
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
        """Count the storage of `tensor`, unless it is counted already or belongs to another device."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper without its own memory
            return
        key = storage_key(storage)
        nbytes = storage.nbytes()
        row = self.rows.get(key)
        if row is not None and row.nbytes == nbytes:
            return
        if self.device is not None and storage.device != self.device:
            return
        with self._lock:
            self._subtract_freed()
            if row is None:
                row = _Row(storage, self._storage_freed)
                row.key, row.nbytes = key, 0
                self.rows[key] = row
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
        for parameter in module.parameters():
            self.count(parameter)
            if parameter.grad is not None:
                self.count(parameter.grad)
        for buffer in module.buffers():
            self.count(buffer)

    def count_everything(self) -> None:
        """Count every tensor that Python knows: parameters, optimizer state, data. Takes tens of milliseconds."""
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor) and _has_memory(item):
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


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return False for meta and fake tensors: they have a size but no memory. Compilers leave many of them."""
    try:
        return tensor.untyped_storage().device.type != "meta"
    except (NotImplementedError, RuntimeError):  # a wrapper without its own memory
        return False
