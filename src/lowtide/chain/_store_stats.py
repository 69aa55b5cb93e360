"""Snapshots of an activation store: its statistics and one entry."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A store's accounts at one moment."""

    stored: int
    """How many puts there ever were."""
    resident: int
    """Entries held now."""
    bytes_stored: int
    """What the resident entries take, as they are stored."""
    bytes_avoided: int
    """How much more they would take, were they stored exactly."""
    peak_bytes: int
    """The most that `bytes_stored` ever was."""
    budget_bytes: int | None
    slots: int | None
    utilisation: float
    """The share of the budget in use; without a budget that of the slots; 0.0 where there is neither."""
    evictions: int
    hits: int
    misses: int


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """What is known of one entry."""

    key: Hashable
    nbytes: int
    """Bytes that it takes as stored."""
    exact_bytes: int
    """Bytes that it had when it was put."""
    cost: float
    """Recompute cost, as given to `put`."""
    tier: str
    pinned: bool
    stored_at: float
    """`time.time()` of the put."""
