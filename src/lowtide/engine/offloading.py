"""Offloading: values that wait in a store, written while ops run and read before they are asked for.

What is written stays in memory until it is let go, which then costs nothing. What could not be written (a full
disk) stays in memory, held by the store, and is a value like any other again once it has been fetched.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

from .._errors import StoreError
from ..profiling.tiers import measure_store
from ..stores import Store, Ticket
from .eviction import Pace, Pool, seat_of
from .values import Tensor, Value, flat

_SPARE = 8  # of the limit, 1/8 is left free by what is read ahead


class Offloading:
    """The traffic of one room with its store."""

    def __init__(self, store: Store, pace: Pace, pool: Pool, counts: Counter[str]) -> None:
        self.store = store
        self.pace = pace
        self.pool = pool
        self.counts = counts
        self.fails = False  # a write has failed since this room opened
        self._fallbacks = store.stats().fallbacks
        self._waiting: list[tuple[int, weakref.ref[Value]]] = []  # away in the store; what is asked for first is last
        self._leaving: list[tuple[weakref.ref[Ticket], Store]] = []  # let go, and perhaps not yet written
        self._fallen: list[weakref.ref[Value]] = []  # could not be written: still in memory, held by the store

    def us_per_byte(self, value: Value) -> float:
        """What it takes to write a byte, if it is not written yet, and to read it, as far as ops do not hide it."""
        if seat_of(value).ticket is not None:
            return self.pace.in_us
        return self.pace.out_us + self.pace.in_us if not self.fails else float("inf")

    def look(self) -> None:
        """How the store is doing: whether a write has failed (the next scope tries again), and how fast it is."""
        stats = self.store.stats()
        self.fails = stats.fallbacks > self._fallbacks
        self.pace.moved(stats)

    def settle(self, nbytes: int) -> None:
        """Wait until so many bytes that were let go are written, and their memory free."""
        with self._waiting_time():
            self.store.settle(nbytes)
        self.look()

    def in_flight_bytes(self) -> int:
        """What is being written."""
        return self.store.stats().in_flight_bytes

    # -- out ------------------------------------------------------------------------------------------

    def write(self, value: Value) -> None:
        """Have a value written. It stays in memory until it is let go."""
        assert value.tensor is not None
        seat = seat_of(value)
        with self._waiting_time():
            seat.ticket = self.store.put(flat(value.tensor), str(value.origin))
        seat.store = self.store
        self.counts["written bytes"] += value.nbytes

    def evict(self, value: Value) -> None:
        """Let a value go, written or about to be."""
        seat = seat_of(value)
        if seat.ticket is None or seat.store is None or seat.store.closed:
            self.write(value)
        assert seat.ticket is not None
        assert seat.store is not None
        self.counts["offloaded"] += 1
        self._wait(value, weakref.ref(value))
        self._leaving.append((weakref.ref(seat.ticket), seat.store))
        value.let_go()

    def leaving_bytes(self) -> int:
        """What was let go and is in memory only until it is written."""
        leaving = 0
        staying = []
        for ref, store in self._leaving:
            ticket = ref()
            if ticket is not None and not store.closed and not ticket.fell_back and store.is_resident(ticket):
                staying.append((ref, store))
                leaving += ticket.nbytes
        self._leaving = staying
        return leaving

    def fallen(self) -> Iterator[Value]:
        """What could not be written, and is still in memory."""
        if not self.fails:
            return
        for ref in [*self._fallen, *(ref for _, ref in self._waiting)]:
            value = ref()
            seat = value.seat if value is not None else None
            if value is not None and seat is not None and seat.ticket is not None and seat.ticket.fell_back:
                yield value

    # -- in -------------------------------------------------------------------------------------------

    def fetch(self, ticket: Ticket, store: Store) -> Tensor:
        """Read a value back; also one that was written to the store of another room."""
        with self._waiting_time():
            tensor = store.fetch(ticket)
        self.counts["fetched"] += 1
        return tensor

    def read_ahead(self, limit_bytes: int, free: int) -> None:
        """Read what backward will ask for next, as long as there is room to spare."""
        spare = free - limit_bytes // _SPARE
        waiting = self._waiting
        while waiting:
            value = waiting[-1][1]()
            seat = value.seat if value is not None and value.tensor is None else None
            if seat is None or seat.ticket is None or seat.store is None:
                waiting.pop()
                continue
            if seat.ticket.fell_back:
                self._fallen.append(waiting.pop()[1])
                continue
            spare -= seat.store.bytes_to_fetch(seat.ticket)
            if spare < 0:
                return
            self.pool.ahead.append(waiting.pop()[1])
            seat.store.prefetch(seat.ticket)

    def give_back_ahead(self, is_enough: Callable[[], bool]) -> None:
        """Let go of what was read ahead, what will be asked for last first, as far as its memory is needed."""
        ahead = self.pool.ahead
        while ahead and not is_enough():
            ref = ahead.pop()
            value = ref()
            seat = value.seat if value is not None and value.tensor is None else None
            if value is None or seat is None or seat.ticket is None or seat.store is None:
                continue
            if seat.store.bytes_to_fetch(seat.ticket) == 0:
                seat.store.fetch(seat.ticket)  # the result is not kept; what is on the disk stays there
                self._wait(value, ref)

    def _wait(self, value: Value, ref: weakref.ref[Value]) -> None:
        bisect.insort(self._waiting, (_asked_at(value), ref), key=operator.itemgetter(0))

    @contextlib.contextmanager
    def _waiting_time(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.pace.waited_seconds += time.perf_counter() - start


def is_being_written(value: Value) -> bool:
    """Whether a store holds the memory of a value for now, so that it is not the engine's alone."""
    seat = value.seat
    if seat is None or seat.ticket is None or seat.store is None or seat.store.closed:
        return False
    return seat.store.is_resident(seat.ticket)


def wait_until_written(store: Store, ticket: Ticket) -> None:
    """Wait until a value has left memory; not for one that cannot be written."""
    while not ticket.fell_back and store.is_resident(ticket):
        if not store.settle(ticket.nbytes):
            return  # nothing is on its way any more


def save_from_overwriting(value: Value) -> None:
    """The memory of a value is about to be written: a store that still reads it is waited for, or gets a copy."""
    if not is_being_written(value):
        return
    seat = seat_of(value)
    assert seat.store is not None
    assert seat.ticket is not None
    wait_until_written(seat.store, seat.ticket)
    if seat.store.is_resident(seat.ticket):  # it fell back: the store has nothing but this memory
        value.own(seat.store.fetch(seat.ticket).clone(), for_now=value.recipe is not None)
        seat.ticket = None


def _asked_at(value: Value) -> int:
    """When backward will ask for a value: what was saved last is asked for first."""
    seat = seat_of(value)
    return seat.saves[-1] if seat.saves else seat.made


_paces: weakref.WeakKeyDictionary[Store, Pace] = weakref.WeakKeyDictionary()


def pace_of(store: Store) -> Pace | None:
    """How fast a store is, measured once; None while it cannot be written, which it has said itself."""
    pace = _paces.get(store)
    if pace is None:
        try:
            pace = _paces[store] = Pace(measure_store(store, nbytes=8 * 2**20))
        except StoreError:
            if store.closed:
                raise
    return pace
