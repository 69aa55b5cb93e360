"""Offloading under a memory budget: values in a store, written while ops run and prefetched before their unpack.

A written value stays in memory until it is evicted, which then costs nothing. A value that could not be written (a full
disk) stays in memory, held by the store, until it is fetched.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

from ...stores import Store
from ..values.value import Tensor, Value
from ..values.view import flat
from .eviction import Pace, Pool, residency_of
from .placement import Placement, put_in_store

_SPARE = 8
"""Prefetching leaves 1/8 of the limit free. Doubled (1/16): more prefetches, more evictions of prefetched values."""


class Offloading:
    """The transfers of one memory budget."""

    def __init__(self, store: Store, pace: Pace, pool: Pool, counts: Counter[str]) -> None:
        self.store = store
        self.pace = pace
        self.pool = pool
        self.counts = counts
        self.fails = False  # a write has failed since this budget was opened
        self._fallbacks = store.stats().fallbacks
        self._offloaded: list[
            tuple[int, weakref.ref[Value]]
        ] = []  # sorted by time of saving; the last is unpacked first
        self._unwritten: list[weakref.ref[Placement]] = []  # evicted, perhaps not written yet
        self._failed: list[weakref.ref[Value]] = []  # could not be written: in memory, held by the store

    def us_per_byte(self, value: Value) -> float:
        """Return the exposed time per byte to write (unless written already) and read a value."""
        placement = residency_of(value).placement
        if placement is not None and not placement.is_compressed:
            return self.pace.in_us
        return self.pace.out_us + self.pace.in_us if not self.fails else float("inf")

    def update(self) -> None:
        """Learn whether a write has failed, and how fast the store is. The next scope tries a failed store again."""
        stats = self.store.stats()
        self.fails = stats.fallbacks > self._fallbacks
        self.pace.moved(stats)

    def wait_for_writes(self, nbytes: int) -> None:
        """Wait until `nbytes` of evicted values are written and their memory is free."""
        with self._waiting_time():
            self.store.drain(nbytes)
        self.update()

    def in_flight_bytes(self) -> int:
        """Return the bytes that are being written."""
        return self.store.stats().in_flight_bytes

    def prefetched_bytes(self) -> int:
        """Return the bytes that were prefetched and not yet fetched."""
        return self.store.stats().prefetched_bytes

    # -- out ------------------------------------------------------------------------------------------

    def write(self, value: Value) -> None:
        """Start to write a value. It stays in memory until it is evicted."""
        assert value.tensor is not None
        with self._waiting_time():
            residency_of(value).placement = put_in_store(self.store, flat(value.tensor), str(value.origin))
        self.counts["written bytes"] += value.nbytes

    def evict(self, value: Value) -> None:
        """Free the memory of a value once it is written."""
        residency = residency_of(value)
        if residency.placement is None or not residency.placement.is_usable:
            self.write(value)
        assert residency.placement is not None
        self.counts["offloaded"] += 1
        self._add_offloaded(value, weakref.ref(value))
        self._unwritten.append(weakref.ref(residency.placement))
        value.release()

    def unwritten_bytes(self) -> int:
        """Return the bytes of evicted values that are in memory only until they are written."""
        leaving = 0
        staying = []
        for ref in self._unwritten:
            placement = ref()
            if placement is not None and not placement.has_failed and placement.is_being_written():
                staying.append(ref)
                leaving += placement.nbytes
        self._unwritten = staying
        return leaving

    def failed(self) -> Iterator[Value]:
        """Yield the values that could not be written and are still in memory."""
        if not self.fails:
            return
        for ref in [*self._failed, *(ref for _, ref in self._offloaded)]:
            value = ref()
            placement = value.residency.placement if value is not None and value.residency is not None else None
            if value is not None and placement is not None and placement.has_failed:
                yield value

    # -- in -------------------------------------------------------------------------------------------

    def fetch(self, placement: Placement) -> Tensor:
        """Read a value back, also from the store of another budget."""
        with self._waiting_time():
            tensor = placement.get()
        self.counts["fetched"] += 1
        return tensor

    def prefetch_next(self, limit_bytes: int, free_bytes: int) -> None:
        """Prefetch the values that backward will unpack next, as far as memory allows."""
        spare = free_bytes - limit_bytes // _SPARE
        offloaded = self._offloaded
        while offloaded:
            value = offloaded[-1][1]()
            placement = _missing_placement(value)
            if placement is None:
                offloaded.pop()
                continue
            if placement.has_failed:
                self._failed.append(offloaded.pop()[1])
                continue
            spare -= placement.bytes_to_get()
            if spare < 0:
                return
            self.pool.prefetched.append(offloaded.pop()[1])
            placement.prefetch()

    def drop_prefetched(self, is_enough: Callable[[], bool]) -> None:
        """Free prefetched memory, the value that is unpacked last first, until `is_enough`."""
        prefetched = self.pool.prefetched
        while prefetched and not is_enough():
            ref = prefetched.pop()
            value = ref()
            placement = _missing_placement(value)
            if value is None or placement is None:
                continue
            if placement.bytes_to_get() == 0:
                placement.get()  # the result is not kept; the content stays on the disk
                self._add_offloaded(value, ref)

    def _add_offloaded(self, value: Value, ref: weakref.ref[Value]) -> None:
        residency = residency_of(value)
        saved_at = residency.saves[-1] if residency.saves else residency.made
        bisect.insort(self._offloaded, (saved_at, ref), key=operator.itemgetter(0))

    @contextlib.contextmanager
    def _waiting_time(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.pace.waited_seconds += time.perf_counter() - start


def _missing_placement(value: Value | None) -> Placement | None:
    """Return the placement in a store of a value that is not in memory."""
    if value is None or value.tensor is not None or value.residency is None:
        return None
    placement = value.residency.placement
    return None if placement is None or placement.is_compressed else placement


def is_being_written(value: Value) -> bool:
    """Return whether a store still reads the memory of a value, which is then not exclusively the engine's."""
    placement = value.residency.placement if value.residency is not None else None
    return placement is not None and placement.is_being_written()


def finish_write(value: Value) -> None:
    """Wait for a write of this value, because its memory is about to be overwritten. A failed write gets a copy."""
    residency = value.residency
    if residency is None or residency.placement is None or not residency.placement.is_being_written():
        return
    placement = residency.placement
    placement.wait_until_written()
    if placement.is_being_written():  # the write failed: the store has only this memory
        value.own(placement.get().clone(), evictable=value.recipe is not None)
        residency.placement = None
