"""The table of live storages: which value each one contains now (Rule 3)."""

from __future__ import annotations

import weakref

import torch

from ...torch_compat import storage_key
from .value import Tensor, Value


class StorageEntry(weakref.ref[torch.UntypedStorage]):
    """One row: a weak reference to a storage, and its value.

    The value is held strongly while it holds no tensor, and dies with the storage. Once it holds a tensor it is held
    weakly: otherwise the table would keep the storage alive.
    """

    __slots__ = ("key", "strong", "weak")
    key: int
    strong: Value | None
    weak: weakref.ref[Value] | None

    def value(self) -> Value | None:
        """Return the value, or None once all its handles and recipes are gone."""
        if self.strong is not None:
            return self.strong
        return self.weak() if self.weak is not None else None

    def put(self, value: Value) -> None:
        """Set the value that this storage contains now."""
        if value.tensor is None:
            self.strong, self.weak = value, None
        else:
            self.strong, self.weak = None, weakref.ref(value)


class StorageTable(dict[int, StorageEntry]):
    """Rows by storage key. A row is removed when its storage is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: set[int] = set()
        """Keys of storages without a row that were made in this scope. They may have been freed since."""
        pop = self.pop
        self._storage_freed = lambda entry: pop(entry.key, None)

    def add(self, key: int, storage: torch.UntypedStorage, value: Value) -> None:
        """Add a row for a new storage. `value` must not hold a tensor."""
        entry = StorageEntry(storage, self._storage_freed)
        entry.key = key
        entry.strong = value
        entry.weak = None
        self[key] = entry

    def put(self, storage: torch.UntypedStorage, value: Value) -> None:
        """Set the value that `storage` contains now."""
        key = storage_key(storage)
        if key not in self:
            self.add(key, storage, value)
        self[key].put(value)

    def put_source(self, tensor: Tensor, storage: torch.UntypedStorage) -> Value:
        """Add the present content of `tensor` as a source: held from now on, never recomputed."""
        value = Value(None, storage.nbytes(), None)
        value.hold(tensor, storage)
        value.key = storage_key(storage)
        self.put(storage, value)
        return value
