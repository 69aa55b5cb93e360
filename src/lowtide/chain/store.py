"""`ActivationStore`: activations by key, within a number of bytes or entries.

`bytes_stored` is always the exact sum over the resident entries, also with several threads. Values are
copied in and out, so a caller that writes into its arrays does not change the store. The caller, such as a
`Checkpointer` or a schedule, decides which values to store.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from .._errors import ArgumentError, BudgetError, MissingCheckpointError
from .._units import format_bytes, parse_bytes
from ._arrays import (
    ArrayLayout,
    array_bytes,
    copy_array,
    flat_from_bytes,
    flat_to_bytes,
    flatten,
    from_flat,
    to_flat,
    unflatten,
)
from ._disk import Extent, ScratchFile
from ._precision import Compressed, check_precision, compress, decompress
from ._store_stats import StoredEntry, StoreStats

Evict: TypeAlias = Literal["oldest", "cheapest", "largest", "error"]
Precision: TypeAlias = Literal["exact", "float16", "bfloat16", "int8"]
Tier: TypeAlias = Literal["memory", "disk"]

_EVICT = ("oldest", "cheapest", "largest", "error")
_TIERS = ("memory", "disk")


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """An array in the scratch file."""

    extent: Extent
    layout: ArrayLayout


@dataclass(frozen=True, slots=True)
class _StoredValue:
    skeleton: Any
    leaves: list[Any]  # arrays, Compressed, or _OnDisk
    entry: StoredEntry


class ActivationStore:
    """Activations (arrays or nested containers of arrays) by key.

    `budget` (`"512 MiB"` or an int) limits the resident bytes, `slots` the resident entries. If a new entry
    does not fit, `evict` selects the entries to remove: the `"oldest"`, the `"cheapest"` (by the cost given to
    `put`; of equals the oldest) or the `"largest"`. `evict="error"` raises `BudgetError` instead.
    `precision` stores floats as `"float16"`, `"bfloat16"` or `"int8"` by block and returns them in their
    original dtype; the guide has the error bounds. `tier="disk"` stores the bytes in a private scratch file in
    `directory`, by default the system's directory for temporary files, which on some systems is in memory.

    >>> import numpy as np
    >>> store = ActivationStore(budget="1 KiB", evict="oldest")
    >>> store.put("a", np.zeros(100)), store.put("b", np.zeros(100))
    ((), ('a',))
    """

    def __init__(
        self,
        *,
        budget: str | int | None = None,
        slots: int | None = None,
        evict: Evict = "oldest",
        precision: Precision = "exact",
        tier: Tier = "memory",
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or slots < 1):
            raise ArgumentError(f"slots is the maximum number of entries, an int ≥ 1, not {slots!r}")
        if evict not in _EVICT:
            raise ArgumentError(f"evict is one of {', '.join(map(repr, _EVICT))}, not {evict!r}")
        if tier not in _TIERS:
            raise ArgumentError(f"tier is 'memory' or 'disk', not {tier!r}")
        if directory is not None and tier != "disk":
            raise ArgumentError("directory= needs tier='disk'")
        self.budget_bytes = None if budget is None else parse_bytes(budget)
        self.slots = slots
        self.evict = evict
        self.precision = check_precision(precision)
        self.tier = tier
        self.scratch = ScratchFile(directory) if tier == "disk" else None
        self._lock = threading.RLock()
        self._values: dict[Hashable, _StoredValue] = {}  # oldest first
        self._bytes = self._avoided_bytes = self._peak_bytes = 0
        self._puts = self._evictions = self._hits = self._misses = 0

    # Writing

    def put(self, key: Hashable, value: Any, cost: float = 1.0, *, pinned: bool = False) -> tuple[Hashable, ...]:
        """Store a copy of `value` under `key`, and return the evicted keys.

        A previous value of `key` is released after the new one is stored, so both exist for a moment. A `pinned`
        entry is never evicted. Raises `BudgetError`, without changing the store, if evictions cannot free
        enough space.
        """
        if not math.isfinite(cost):
            raise ArgumentError(f"the cost of {key!r} must be a finite number, not {cost!r}")
        arrays, skeleton = flatten(value)
        exact_bytes = sum(map(array_bytes, arrays))
        with self._lock:
            leaves = self._compressed(arrays)
            size = sum(map(_leaf_bytes, leaves))
            victims = self._select_victims(key, size)
            if self.scratch is None:
                # Evict before copying: the copy beside its victims would exceed the budget.
                self._evict(victims)
                leaves = [leaf if isinstance(leaf, Compressed) else copy_array(leaf) for leaf in leaves]
            else:
                # Write before evicting: a failed write must not lose entries.
                leaves = self._write_to_disk(leaves)
                self._evict(victims)
            self._remove(key)
            entry = StoredEntry(key, size, exact_bytes, float(cost), self.tier, pinned, time.time())
            self._values[key] = _StoredValue(skeleton, leaves, entry)
            self._bytes += size
            self._avoided_bytes += exact_bytes - size
            self._peak_bytes = max(self._peak_bytes, self._bytes)
            self._puts += 1
        return tuple(victims)

    def measure(self, value: Any) -> int:
        """Return the bytes that `value` would take in this store."""
        return sum(map(_leaf_bytes, self._compressed(flatten(value)[0])))

    def _compressed(self, arrays: list[Any]) -> list[Any]:
        if self.precision == "exact":
            return arrays
        return [compressed if (compressed := compress(leaf, self.precision)) is not None else leaf for leaf in arrays]

    def _select_victims(self, key: Hashable, size: int) -> list[Hashable]:
        """Return the keys to evict so that `size` bytes under `key` fit."""
        old = self._values.get(key)
        free_bytes = math.inf
        if self.budget_bytes is not None:
            free_bytes = self.budget_bytes - self._bytes + (old.entry.nbytes if old else 0)
        free_slots = math.inf if self.slots is None else self.slots - len(self._values) + (old is not None)
        if size <= free_bytes and free_slots >= 1:
            return []
        others = [value.entry for name, value in self._values.items() if name != key]
        evictable = [entry for entry in others if not entry.pinned and self.evict != "error"]
        evictable_bytes = sum(entry.nbytes for entry in evictable)
        if size > free_bytes + evictable_bytes or free_slots + len(evictable) < 1:
            used_bytes = sum(entry.nbytes for entry in others)
            raise BudgetError(
                self._does_not_fit_message(key, size, used_bytes, len(others)),
                budget_bytes=self.budget_bytes or 0,
                smallest_bytes=None if self.budget_bytes is None else size + used_bytes - evictable_bytes,
            )
        if self.evict == "cheapest":
            evictable.sort(key=lambda entry: entry.cost)
        elif self.evict == "largest":
            evictable.sort(key=lambda entry: -entry.nbytes)
        victims = []
        for entry in evictable:
            if size <= free_bytes and free_slots >= 1:
                break
            victims.append(entry.key)
            free_bytes += entry.nbytes
            free_slots += 1
        return victims

    def _does_not_fit_message(self, key: Hashable, size: int, used_bytes: int, used_slots: int) -> str:
        needs = f"{key!r} needs {format_bytes(size)}"
        if self.budget_bytes is not None and size > self.budget_bytes:
            return (
                f"{needs}, more than the whole budget of {format_bytes(self.budget_bytes)}. It was not stored "
                "and nothing was evicted. Raise budget=, or store narrower with precision="
            )
        usage = []
        if self.budget_bytes is not None:
            usage.append(f"{format_bytes(used_bytes)} of {format_bytes(self.budget_bytes)} are in use")
        if self.slots is not None:
            usage.append(f"{used_slots} of {self.slots} slots are in use")
        why = "evict='error' forbids evictions" if self.evict == "error" else "pinned entries cannot be evicted"
        return (
            f"{needs}, but {' and '.join(usage)}, and {why}. It was not stored and nothing was evicted. "
            "Raise budget= or slots=, or remove entries"
        )

    def _write_to_disk(self, leaves: list[Any]) -> list[Any]:
        """Return the leaves with their arrays on disk. If a write fails, undo the previous ones."""
        assert self.scratch is not None
        written: list[Extent] = []

        def write(array: Any) -> _OnDisk:
            assert self.scratch is not None
            flat, layout = to_flat(array)
            written.append(self.scratch.write(flat_to_bytes(flat)))
            return _OnDisk(written[-1], layout)

        try:
            return [
                replace(leaf, parts=tuple(map(write, leaf.parts))) if isinstance(leaf, Compressed) else write(leaf)
                for leaf in leaves
            ]
        except BaseException:
            for extent in written:
                self.scratch.free(extent)
            raise

    # Reading and removing

    def get(self, key: Hashable) -> Any:
        """Return a copy of the value under `key`. Raises `MissingCheckpointError` if `key` is not stored."""
        with self._lock:
            return self._restore(self._find(key), copy=True)

    def take(self, key: Hashable) -> Any:
        """Remove and return the value under `key`, without a copy in memory.

        Raises `MissingCheckpointError` if `key` is not stored.
        """
        with self._lock:
            value = self._restore(self._find(key), copy=False)
            self._remove(key)
            return value

    def remove(self, key: Hashable) -> None:
        """Remove `key`. Raises `MissingCheckpointError` if `key` is not stored."""
        with self._lock:
            if key not in self._values:
                raise MissingCheckpointError(self._missing_message(key))
            self._remove(key)

    def clear(self) -> None:
        """Remove all entries. The counters of `stats()` continue."""
        with self._lock:
            for key in list(self._values):
                self._remove(key)

    def close(self) -> None:
        """Remove all entries and close the scratch file. A closed disk store accepts no more values."""
        with self._lock:
            self.clear()
            if self.scratch is not None:
                self.scratch.close()

    def _find(self, key: Hashable) -> _StoredValue:
        value = self._values.get(key)
        if value is None:
            self._misses += 1
            raise MissingCheckpointError(self._missing_message(key))
        self._hits += 1
        return value

    def _missing_message(self, key: Hashable) -> str:
        keys = list(self._values)
        shown = ", ".join(map(repr, keys[:8])) + (", …" if len(keys) > 8 else "")
        evicted = f"; {self._evictions} entries were evicted so far" if self._evictions else ""
        return f"nothing is stored under {key!r} (stored: {shown or 'nothing'}{evicted})"

    def _restore(self, value: _StoredValue, *, copy: bool) -> Any:
        """Rebuild the tree. `copy` is False if the store gives up its arrays."""

        def restore_leaf(leaf: Any) -> Any:
            if isinstance(leaf, Compressed):
                on_disk = self.scratch is not None
                return decompress(replace(leaf, parts=tuple(map(restore_leaf, leaf.parts))) if on_disk else leaf)
            if isinstance(leaf, _OnDisk):
                assert self.scratch is not None
                return from_flat(flat_from_bytes(self.scratch.read(leaf.extent), leaf.layout), leaf.layout)
            return copy_array(leaf) if copy else leaf

        return unflatten(value.skeleton, [restore_leaf(leaf) for leaf in value.leaves])

    def _evict(self, keys: list[Hashable]) -> None:
        for key in keys:
            self._remove(key)
            self._evictions += 1

    def _remove(self, key: Hashable) -> None:
        """Remove `key`, if stored, and free its bytes."""
        value = self._values.pop(key, None)
        if value is None:
            return
        self._bytes -= value.entry.nbytes
        self._avoided_bytes -= value.entry.exact_bytes - value.entry.nbytes
        if self.scratch is not None:
            for leaf in value.leaves:
                for part in leaf.parts if isinstance(leaf, Compressed) else (leaf,):
                    self.scratch.free(part.extent)

    # Statistics

    @property
    def bytes_stored(self) -> int:
        """Bytes of the resident entries, as stored."""
        return self._bytes

    @property
    def bytes_avoided(self) -> int:
        """Bytes saved by narrow precision: exact size minus stored size of the resident entries."""
        return self._avoided_bytes

    def stats(self) -> StoreStats:
        """Return the current statistics."""
        with self._lock:
            utilisation = 0.0
            if self.budget_bytes is not None:
                utilisation = self._bytes / self.budget_bytes
            elif self.slots is not None:
                utilisation = len(self._values) / self.slots
            return StoreStats(
                stored=self._puts,
                resident=len(self._values),
                bytes_stored=self._bytes,
                bytes_avoided=self._avoided_bytes,
                peak_bytes=self._peak_bytes,
                budget_bytes=self.budget_bytes,
                slots=self.slots,
                utilisation=utilisation,
                evictions=self._evictions,
                hits=self._hits,
                misses=self._misses,
            )

    def entry(self, key: Hashable) -> StoredEntry:
        """Return the metadata of the entry under `key`. Raises `MissingCheckpointError` if it is not stored."""
        with self._lock:
            if key not in self._values:
                raise MissingCheckpointError(self._missing_message(key))
            return self._values[key].entry

    def keys(self) -> tuple[Hashable, ...]:
        """Return the keys, oldest first."""
        with self._lock:
            return tuple(self._values)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._values

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._values)

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self.stats()
        limit = "" if self.budget_bytes is None else f" of {format_bytes(self.budget_bytes)}"
        return f"<ActivationStore: {stats.resident} entries, {format_bytes(stats.bytes_stored)}{limit} in {self.tier}>"


def _leaf_bytes(leaf: Any) -> int:
    return sum(map(array_bytes, leaf.parts)) if isinstance(leaf, Compressed) else array_bytes(leaf)
