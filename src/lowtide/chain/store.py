"""`ActivationStore`: activations by key, within a number of bytes or of entries.

Its accounts are exact: `bytes_stored` is the sum of what the resident entries take, after every replacing,
taking and evicting, also under threads. What is stored and what is given back are copies, so a step that
writes into its arguments cannot reach inside. It says nothing about what is worth storing: that is the
business of a `Checkpointer` or a schedule.
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
    Blueprint,
    array_bytes,
    copy_array,
    flatten,
    lay_out,
    row_bytes,
    row_from_bytes,
    stand_up,
    unflatten,
)
from ._disk import Extent, ScratchFile
from ._precision import Packed, check_precision, pack, unpack
from ._store_stats import StoredEntry, StoreStats

Evict: TypeAlias = Literal["oldest", "cheapest", "largest", "error"]
Precision: TypeAlias = Literal["exact", "float16", "bfloat16", "int8"]
Tier: TypeAlias = Literal["memory", "disk"]

_EVICT = ("oldest", "cheapest", "largest", "error")
_TIERS = ("memory", "disk")


@dataclass(frozen=True, slots=True)
class _OnDisk:
    """An array that waits in the scratch file."""

    extent: Extent
    plan: Blueprint


@dataclass(frozen=True, slots=True)
class _Held:
    skeleton: Any
    leaves: list[Any]  # arrays, Packed, or _OnDisk
    entry: StoredEntry


class ActivationStore:
    """Activations (arrays or nested containers of arrays) by key.

    `budget` (`"512 MiB"` or an int) and `slots` limit what is resident; when there is no room, entries are
    evicted by the rule `evict`: the `"oldest"`, the `"cheapest"` (by the cost given to `put`; of equals the
    oldest), the `"largest"`, or none, with a `BudgetError` (`"error"`). `precision` stores floats narrower
    (`"float16"`, `"bfloat16"`, `"int8"` by block, see the guide for the error bounds) and gives them back in
    the dtype they had. `tier="disk"` holds the bytes in a private scratch file in `directory` (by default the
    system's directory for temporary files, which on some systems is memory).

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
            raise ArgumentError(f"slots is the most entries to hold, an int ≥ 1, not {slots!r}")
        if evict not in _EVICT:
            raise ArgumentError(f"evict is one of {', '.join(map(repr, _EVICT))}, not {evict!r}")
        if tier not in _TIERS:
            raise ArgumentError(f"tier is 'memory' or 'disk', not {tier!r}")
        if directory is not None and tier != "disk":
            raise ArgumentError("directory= is for tier='disk'")
        self.budget_bytes = None if budget is None else parse_bytes(budget)
        self.slots = slots
        self.evict = evict
        self.precision = check_precision(precision)
        self.tier = tier
        self._scratch = ScratchFile(directory) if tier == "disk" else None
        self._lock = threading.RLock()
        self._held: dict[Hashable, _Held] = {}  # oldest first
        self._bytes = self._avoided = self._peak = 0
        self._stored = self._evictions = self._hits = self._misses = 0

    # Storing

    def put(self, key: Hashable, value: Any, cost: float = 1.0, *, pinned: bool = False) -> tuple[Hashable, ...]:
        """Store a copy of `value` under `key`, and return the keys that were evicted for it.

        An older value of that key is replaced; it is released only when the new one is safely stored, so for a
        moment both exist. A `pinned` entry counts like any other but is never evicted. When the entry cannot
        fit whatever is evicted, `BudgetError` is raised and nothing has changed.
        """
        if not math.isfinite(cost):
            raise ArgumentError(f"the cost of {key!r} must be a finite number, not {cost!r}")
        arrays, skeleton = flatten(value)
        exact = sum(map(array_bytes, arrays))
        with self._lock:
            leaves = self._narrowed(arrays)
            size = sum(map(_leaf_bytes, leaves))
            victims = self._victims(key, size)
            if self._scratch is None:
                # Room first: a copy beside its victims would exceed the budget.
                self._evict(victims)
                leaves = [leaf if isinstance(leaf, Packed) else copy_array(leaf) for leaf in leaves]
            else:
                # Writing first: it can fail, and then nothing may be lost.
                leaves = self._spill(leaves)
                self._evict(victims)
            self._drop(key)
            entry = StoredEntry(key, size, exact, float(cost), self.tier, pinned, time.time())
            self._held[key] = _Held(skeleton, leaves, entry)
            self._bytes += size
            self._avoided += exact - size
            self._peak = max(self._peak, self._bytes)
            self._stored += 1
        return tuple(victims)

    def measure(self, value: Any) -> int:
        """How many bytes `value` would take in this store."""
        return sum(map(_leaf_bytes, self._narrowed(flatten(value)[0])))

    def _narrowed(self, arrays: list[Any]) -> list[Any]:
        if self.precision == "exact":
            return arrays
        return [packed if (packed := pack(leaf, self.precision)) is not None else leaf for leaf in arrays]

    def _victims(self, key: Hashable, size: int) -> list[Hashable]:
        """The keys to evict so that `size` bytes under `key` fit."""
        old = self._held.get(key)
        free = math.inf
        if self.budget_bytes is not None:
            free = self.budget_bytes - self._bytes + (old.entry.nbytes if old else 0)
        places = math.inf if self.slots is None else self.slots - len(self._held) + (old is not None)
        if size <= free and places >= 1:
            return []
        others = {name: held.entry for name, held in self._held.items() if name != key}
        movable = [entry for entry in others.values() if not entry.pinned and self.evict != "error"]
        if size > free + sum(entry.nbytes for entry in movable) or places + len(movable) < 1:
            raise BudgetError(
                self._no_room(key, size, others),
                budget_bytes=self.budget_bytes or 0,
                smallest_bytes=None if self.budget_bytes is None else self._least(size, others),
            )
        if self.evict == "cheapest":
            movable.sort(key=lambda entry: entry.cost)
        elif self.evict == "largest":
            movable.sort(key=lambda entry: -entry.nbytes)
        victims = []
        for entry in movable:
            if size <= free and places >= 1:
                break
            victims.append(entry.key)
            free += entry.nbytes
            places += 1
        return victims

    def _least(self, size: int, others: dict[Hashable, StoredEntry]) -> int:
        stay = [entry for entry in others.values() if entry.pinned or self.evict == "error"]
        return size + sum(entry.nbytes for entry in stay)

    def _no_room(self, key: Hashable, size: int, others: dict[Hashable, StoredEntry]) -> str:
        used = sum(entry.nbytes for entry in others.values())
        what = f"{key!r} takes {format_bytes(size)}"
        if self.budget_bytes is not None and size > self.budget_bytes:
            return (
                f"{what}, more than the whole budget of {format_bytes(self.budget_bytes)}: it was not stored "
                "and nothing was evicted. Raise budget=, or store narrower with precision="
            )
        memory_budget = []
        if self.budget_bytes is not None:
            memory_budget.append(f"{format_bytes(used)} of {format_bytes(self.budget_bytes)} are in use")
        if self.slots is not None:
            memory_budget.append(f"{len(others)} of {self.slots} slots are taken")
        why = "evict='error' lets nothing go" if self.evict == "error" else "what is left is pinned"
        return f"{what}, but {' and '.join(memory_budget)}, and {why}: it was not stored and nothing was evicted"

    def _spill(self, leaves: list[Any]) -> list[Any]:
        """The leaves with their arrays written to disk: all of them, or none."""
        assert self._scratch is not None
        written: list[Extent] = []

        def out(array: Any) -> _OnDisk:
            assert self._scratch is not None
            row, plan = lay_out(array)
            written.append(self._scratch.write(row_bytes(row)))
            return _OnDisk(written[-1], plan)

        try:
            return [
                replace(leaf, parts=tuple(map(out, leaf.parts))) if isinstance(leaf, Packed) else out(leaf)
                for leaf in leaves
            ]
        except BaseException:
            for extent in written:
                self._scratch.free(extent)
            raise

    # Giving back

    def get(self, key: Hashable) -> Any:
        """A copy of what is stored under `key`; `MissingCheckpointError` if there is nothing."""
        with self._lock:
            return self._restored(self._found(key), own=False)

    def take(self, key: Hashable) -> Any:
        """What is stored under `key`, which is then no longer stored. Nothing is copied in memory."""
        with self._lock:
            value = self._restored(self._found(key), own=True)
            self._drop(key)
            return value

    def remove(self, key: Hashable) -> None:
        """Remove `key`; `MissingCheckpointError` if it is not stored."""
        with self._lock:
            if key not in self._held:
                raise MissingCheckpointError(self._missing(key))
            self._drop(key)

    def clear(self) -> None:
        """Remove everything. The counters of `stats()` go on."""
        with self._lock:
            for key in list(self._held):
                self._drop(key)

    def close(self) -> None:
        """Remove everything and close the scratch file. A closed disk store accepts no more values."""
        with self._lock:
            self.clear()
            if self._scratch is not None:
                self._scratch.close()

    def _found(self, key: Hashable) -> _Held:
        held = self._held.get(key)
        if held is None:
            self._misses += 1
            raise MissingCheckpointError(self._missing(key))
        self._hits += 1
        return held

    def _missing(self, key: Hashable) -> str:
        keys = list(self._held)
        shown = ", ".join(map(repr, keys[:8])) + (", …" if len(keys) > 8 else "")
        evicted = f"; {self._evictions} entries were evicted so far" if self._evictions else ""
        return f"nothing is stored under {key!r} (stored: {shown or 'nothing'}{evicted})"

    def _restored(self, held: _Held, *, own: bool) -> Any:
        def back(leaf: Any) -> Any:
            if isinstance(leaf, Packed):
                return unpack(leaf if self._scratch is None else replace(leaf, parts=tuple(map(back, leaf.parts))))
            if isinstance(leaf, _OnDisk):
                assert self._scratch is not None
                return stand_up(row_from_bytes(self._scratch.read(leaf.extent), leaf.plan), leaf.plan)
            return leaf if own else copy_array(leaf)

        return unflatten(held.skeleton, [back(leaf) for leaf in held.leaves])

    def _evict(self, keys: list[Hashable]) -> None:
        for key in keys:
            self._drop(key)
            self._evictions += 1

    def _drop(self, key: Hashable) -> None:
        """Remove `key`, if stored, with its bytes."""
        held = self._held.pop(key, None)
        if held is None:
            return
        self._bytes -= held.entry.nbytes
        self._avoided -= held.entry.exact_bytes - held.entry.nbytes
        if self._scratch is not None:
            for leaf in held.leaves:
                for part in leaf.parts if isinstance(leaf, Packed) else (leaf,):
                    self._scratch.free(part.extent)

    # Accounts

    @property
    def bytes_stored(self) -> int:
        """What the resident entries take, as they are stored."""
        return self._bytes

    @property
    def bytes_avoided(self) -> int:
        """How much more the resident entries would take, were they stored exactly."""
        return self._avoided

    def stats(self) -> StoreStats:
        """The accounts of this moment."""
        with self._lock:
            used = 0.0
            if self.budget_bytes is not None:
                used = self._bytes / self.budget_bytes
            elif self.slots is not None:
                used = len(self._held) / self.slots
            return StoreStats(
                stored=self._stored,
                resident=len(self._held),
                bytes_stored=self._bytes,
                bytes_avoided=self._avoided,
                peak_bytes=self._peak,
                budget_bytes=self.budget_bytes,
                slots=self.slots,
                utilisation=used,
                evictions=self._evictions,
                hits=self._hits,
                misses=self._misses,
            )

    def entry(self, key: Hashable) -> StoredEntry:
        """What is known of the entry under `key`."""
        with self._lock:
            if key not in self._held:
                raise MissingCheckpointError(self._missing(key))
            return self._held[key].entry

    def keys(self) -> tuple[Hashable, ...]:
        """The keys, oldest first."""
        with self._lock:
            return tuple(self._held)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._held

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._held)

    def __enter__(self) -> ActivationStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        stats = self.stats()
        limit = "" if self.budget_bytes is None else f" of {format_bytes(self.budget_bytes)}"
        return f"<ActivationStore: {stats.resident} entries, {format_bytes(stats.bytes_stored)}{limit} in {self.tier}>"


def _leaf_bytes(leaf: Any) -> int:
    return sum(map(array_bytes, leaf.parts)) if isinstance(leaf, Packed) else array_bytes(leaf)
