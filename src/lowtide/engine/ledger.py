"""The ledger: how many bytes of tensors are alive now, and the most there have been.

Each storage is one row, however many tensors share it; the row goes when the storage is freed, in whichever
thread. It knows what it has been shown. Memory that a kernel takes and gives back within one op is not in it.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from .torch_private import storage_key


class _Row(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class Ledger:
    """Bytes of live storages."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._live = 0
        self.rows: dict[int, _Row] = {}  # by the key of the storage
        # Storages die anywhere, also while the lock is held: their rows only queue what has to be subtracted.
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()
        rows, freed = self.rows, self._freed

        def gone(row: Any) -> None:
            if rows.pop(row.key, None) is not None:
                freed.append(row.nbytes)

        self._gone = gone

    @property
    def live_bytes(self) -> int:
        """The bytes alive now."""
        if self._freed:
            with self._lock:
                self._settle()
        return self._live

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage behind `tensor`, if it has one, and if it is not counted."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
            return
        key = storage_key(storage)
        nbytes = storage.nbytes()
        row = self.rows.get(key)
        if row is not None and row.nbytes == nbytes:
            return
        with self._lock:
            self._settle()
            if row is None:
                row = _Row(storage, self._gone)
                row.key, row.nbytes = key, 0
                self.rows[key] = row
            self._live += nbytes - row.nbytes  # new, or resized since
            row.nbytes = nbytes
            if self._live > self.peak_bytes:
                self.peak_bytes = self._live

    def see_all(self, items: Iterable[Any]) -> None:
        """Count the tensors among some arguments or results, also inside lists."""
        for item in items:
            if isinstance(item, torch.Tensor):
                self.see(item)
            elif type(item) is list or type(item) is tuple:
                self.see_all(item)

    def see_module(self, module: torch.nn.Module) -> None:
        """Count the parameters and buffers of a model, and the gradients that are there."""
        for parameter in module.parameters():
            self.see(parameter)
            if parameter.grad is not None:
                self.see(parameter.grad)
        for buffer in module.buffers():
            self.see(buffer)

    def see_everything(self) -> None:
        """Count every tensor that Python knows: parameters, optimizer states, data. Takes tens of milliseconds."""
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor) and _has_memory(item):
                self.see(item)
                try:
                    gradient = item.grad if item.is_leaf else None
                except RuntimeError:  # a view that torch refuses to be asked about: its base was written in place
                    continue
                if gradient is not None:
                    self.see(gradient)

    def start_peak(self) -> None:
        """The peak is counted from now on."""
        self.peak_bytes = self.live_bytes

    def _settle(self) -> None:
        freed = self._freed
        while freed:
            self._live -= freed.popleft()


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for meta and fake tensors, of which a compiler leaves many: they have a size, and no bytes."""
    try:
        return tensor.untyped_storage().device.type != "meta"
    except (NotImplementedError, RuntimeError):  # a wrapper without memory of its own
        return False
