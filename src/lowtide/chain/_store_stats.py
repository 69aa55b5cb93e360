"""Snapshots of an activation store: its statistics and one entry."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Statistics of a store at one moment."""

    stored: int
    """Total number of puts."""
    resident: int
    """Entries in the store now."""
    bytes_stored: int
    """Bytes of the resident entries, as stored."""
    bytes_avoided: int
    """Bytes saved by narrow precision: exact size minus stored size of the resident entries."""
    peak_bytes: int
    """Maximum of `bytes_stored` so far."""
    budget_bytes: int | None
    slots: int | None
    utilisation: float
    """Share of the budget in use. Without a budget, share of the slots. Without both, 0.0."""
    evictions: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Metadata of one entry."""

    key: Hashable
    nbytes: int
    """Bytes as stored."""
    exact_bytes: int
    """Bytes of the original value."""
    cost: float
    """Recompute cost, as given to `put`."""
    tier: str
    pinned: bool
    stored_at: float
    """`time.time()` of the put."""
