"""Room: a limit on all live bytes, held by evicting values before an op would exceed it.

Guaranteed: before any op runs, in forward or backward, user's or replayed, what is alive and what the op is
about to make are together within the limit, or `BudgetError` is raised. Only memory that nobody but the
engine holds is evicted, because nothing else would be gained: this also protects the arguments of a running
op. A value is evicted in whichever way costs the least time for each byte: dropped (its recipe makes it
again), compressed, or put into a store. Where the size of a result cannot be known before, it is guessed.
"""

from __future__ import annotations

import bisect
import contextlib
import operator
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Parameter

from .._errors import BudgetError, StoreError
from .._units import format_bytes
from ..codecs import Chooser, decode
from ..codecs._contract import PIECE
from ..profiling.tiers import measure_store
from ..reporting.room_report import RoomReport
from ..stores import Store, Ticket
from . import eviction, sizes
from .effects import OpFacts
from .eviction import Pace, Pool, seat_of
from .ledger import Ledger
from .torch_private import is_alone, storage_key
from .values import Tensor, Value, view_of

LEDGER = Ledger()
POOL = Pool()
_LOCK = threading.RLock()  # scopes evict each other's values

_SIMPLE = frozenset((int, float, bool, type(None)))
_SOLE = 3  # references to a tensor that only its value holds: the value's, a local variable and an argument
_AHEAD = 64  # an eviction frees up to 1/64 of the limit more than is needed, so as not to be called for every op
_EARLY = 2  # writing begins when less than 1/2 of the limit is free: it takes its time
_QUEUE = 8  # and up to 1/8 of the limit waits to be written before it has to
_SPARE = 8  # of the limit, 1/8 is left free by what is read ahead


class Room:
    """The limit of one scope. All rooms share one ledger and one pool: the memory is one."""

    def __init__(self, limit_bytes: int, store: Store | None, chooser: Chooser | None) -> None:
        self.limit_bytes = limit_bytes
        self.store = store
        self.chooser = chooser
        self.ledger = LEDGER
        self.pool = POOL
        self.lock = _LOCK
        self.counts: Counter[str] = Counter()
        self.peak_bytes = 0
        self._pace = _pace_of(store) if store is not None else None
        if self._pace is None:
            self.store = None  # its writes fail, and it has said so
        self._fallbacks = self.store.stats().fallbacks if self.store is not None else 0
        self._store_fails = False
        self._evicting = False
        self._next_early = 0
        self._began = POOL.clock
        self._waiting: list[tuple[int, weakref.ref[Value]]] = []  # away in the store; what is asked for first is last
        self._leaving: list[tuple[weakref.ref[Ticket], Store]] = []  # let go, and perhaps not yet written
        self._fallen: list[weakref.ref[Value]] = []  # could not be written: still in memory, held by the store

    # -- ops ------------------------------------------------------------------------------------------

    def before(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], strictly: bool = True) -> Any:
        """Make room for what an op is about to make; what `after` has to be told."""
        if facts.rebinds:
            return None
        self.pool.clock += 1
        # Written out flat, because it is done for every op: `ledger.see` for what is new, and the key for `sizes`.
        ledger = self.ledger
        rows = ledger.rows
        key: list[Any] = [id(facts.func)]
        for a in args:
            kind = type(a)
            if kind is Tensor or kind is Parameter:
                key.append(a.shape)
                key.append(a.dtype)
                try:
                    storage = a.untyped_storage()
                except (NotImplementedError, RuntimeError):
                    continue
                row = rows.get(storage_key(storage))
                if row is None or row.nbytes != storage.nbytes():
                    ledger.see(a)
            elif kind in _SIMPLE:
                key.append(a)
            elif kind is list and a and type(a[0]) is int:
                key.append(tuple(a))
            else:
                ledger.see_all((a,))
                key.append(sizes.shapes_of((a,)))
        if kwargs:
            key.append(sizes.shapes_of(tuple(kwargs.items())))
        signature = tuple(key)
        nbytes, certain = sizes.bytes_to_be_made(signature, facts, args, kwargs)
        if nbytes:
            self.clear(nbytes, facts.name, strictly and certain)  # a guess is no reason to stop
        return signature, nbytes, ledger.live_bytes

    def after(self, out: Any, noted: Any) -> None:
        """Count what it has made."""
        if noted is None:
            return
        ledger = self.ledger
        if type(out) is Tensor:
            ledger.see(out)
        else:
            ledger.see_all(out if isinstance(out, (tuple, list)) else (out,))
        signature, expected, before = noted
        live = ledger.live_bytes
        if live - before > expected:
            sizes.learn(signature, live - before)
        if live > self.peak_bytes:
            self.peak_bytes = live

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], strictly: bool = True) -> Any:
        """Run an op within the limit; not `strictly`: also beyond it, if nothing can be evicted."""
        noted = self.before(facts, args, kwargs, strictly)
        out = facts.call(*args, **kwargs)
        self.after(out, noted)
        return out

    # -- values ---------------------------------------------------------------------------------------

    @property
    def moves(self) -> bool:
        """Whether values can be evicted other than by dropping them."""
        return self.store is not None or self.chooser is not None

    def admit(self, value: Value) -> None:
        """Autograd saves a value, which may be evicted from now on."""
        pool = self.pool
        seat = seat_of(value)
        seat.touched = seat.made = pool.front = pool.clock
        seat.saves.append(pool.clock)
        pool.add(value)

    def own(self, value: Value, tensor: Tensor) -> None:
        """A value has been made again, or brought back."""
        value.own(tensor, for_now=True)
        eviction.made_again(value)
        seat = seat_of(value)
        seat.touched = self.pool.clock
        if not seat.made and value.origin is not None:
            seat.made = self._began + value.origin.number
        self.pool.add(value)

    def asks(self) -> None:
        """A backward node is about to be given a value."""

    def asked(self, value: Value) -> None:
        """Backward has asked for a value: others will follow."""
        seat = value.seat
        if seat is not None:
            seat.touched = self.pool.clock
            if seat.saves:
                self.pool.front = seat.saves.pop()
        if self._waiting:
            self._read_ahead()

    def bring_back(self, value: Value) -> bool:
        """Give a value its content again, if it is kept elsewhere."""
        seat = value.seat
        if seat is None or not seat.is_away:
            return False
        if seat.encoded is not None:
            self.clear(value.nbytes + _workspace(value.nbytes), "a value to be decompressed")
            tensor = decode(seat.encoded)
            seat.encoded = None
            self.counts["decompressed"] += 1
        else:
            assert seat.store is not None
            assert seat.ticket is not None
            self.clear(seat.store.bytes_to_fetch(seat.ticket), "a value to be read back")
            with self._waiting_for_store():
                tensor = seat.store.fetch(seat.ticket)
            self.counts["fetched"] += 1
            if seat.ticket.fell_back:
                seat.ticket = None  # nothing is on the disk: from now on a value like any other
        self.ledger.see(tensor)
        self.own(value, tensor)
        return True

    # -- making room ----------------------------------------------------------------------------------

    def clear(self, nbytes: int, what: str, strictly: bool = True) -> None:
        """Evict until `nbytes` more are within the limit; `what` is for the error."""
        excess = self.ledger.live_bytes + nbytes - self.limit_bytes
        if self._evicting or excess <= 0:
            if self.moves and excess > -self.limit_bytes // _EARLY and self.pool.clock >= self._next_early:
                with self.lock:
                    self._guarded(self._move_early)
            return
        with self.lock:
            self._guarded(lambda: self._evict(nbytes))
        if strictly and self.ledger.live_bytes + nbytes > self.limit_bytes:
            raise self._error(nbytes, what)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Evict without being called for the ops that this takes."""
        if self._evicting:
            return
        self._evicting = True
        try:
            action()
        finally:
            self._evicting = False

    def _free(self) -> int:
        return self.limit_bytes - self.ledger.live_bytes

    def _evict(self, nbytes: int) -> None:
        """Evict the cheapest values until there is room, and a little more; what has to be written is waited for."""
        wanted = nbytes + self.limit_bytes // _AHEAD
        tries = 0
        self._look_at_store()
        while self._free() < nbytes:
            tries += 1
            members, complete = (self.pool.all(), True) if tries > 8 else self.pool.sample()
            evicted = False
            for value in eviction.least_first(members, self._score):
                evicted |= self._evict_one(value)
                if self._free() >= wanted or self._free() + self._leaving_bytes() >= wanted:
                    break
            if self.store is not None and self._free() < nbytes:
                with self._waiting_for_store():
                    self.store.settle(nbytes - self._free())
                self._look_at_store()
                self._drop_fallen(nbytes)
            if complete and not evicted:
                break
        if self._free() < nbytes:
            self._give_back_ahead(nbytes)

    def _scores(self, members: list[Value]) -> list[tuple[float, Value]]:
        """What each of these would cost for each byte and moment; without those that gain nothing."""
        return [(score, value) for value in members if (score := self._score(value)) is not None]

    def _score(self, value: Value) -> float | None:
        tensor = value.tensor
        if tensor is None or sys.getrefcount(tensor) > _SOLE or not value.nbytes:
            return None
        if not is_alone(tensor) and not self._is_being_written(value):
            return None
        if value.recipe is not None:
            cost_us = eviction.cost_of_dropping(value)
            if self.store is not None:
                cost_us = min(cost_us, self._transfer_us(value) * value.nbytes)
        elif self.moves:
            cost_us = value.nbytes * 1e-3  # a GB a second, until it is known better
        else:
            return None
        return eviction.score(value, cost_us, self.pool)

    def _evict_one(self, value: Value) -> bool:
        """Evict a value in the cheapest way, if there is one."""
        way = self._cheapest(value)
        if way is None:
            return False
        way(value)
        return value.tensor is None

    def _cheapest(self, value: Value) -> Callable[[Value], None] | None:
        """How to evict a value: in the way that takes the least time for each byte saved."""
        best, way = float("inf"), None
        if value.recipe is not None:
            best, way = eviction.cost_of_dropping(value) / value.nbytes, self._drop
        if self.store is not None and (cost_us := self._transfer_us(value)) < best:
            best, way = cost_us, self._offload
        if self.chooser is not None and (cost_us := self._compression_us(value)) < best:
            best, way = cost_us, self._compress
        return way

    def _move_early(self) -> None:
        """Write or compress what will be evicted sooner or later, while there is still room to do so.

        What is written stays in memory as long as it can, and can then be let go at once.
        """
        self._next_early = self.pool.clock + 8
        self._look_at_store()
        goal = self.limit_bytes // _QUEUE
        if self.store is not None:
            goal -= self.store.stats().in_flight_bytes
        members, _ = self.pool.sample()
        for value in eviction.least_first(members, self._score):
            if goal <= 0:
                return
            way = self._cheapest(value)
            if way == self._offload:
                if seat_of(value).ticket is not None:
                    continue
                self._write(value)
            elif way == self._compress and self._free() < self.limit_bytes // 4:  # not hidden: not before it is likely
                way(value)
            goal -= value.nbytes

    def _drop(self, value: Value) -> None:
        self.counts["dropped"] += 1
        self.counts["dropped bytes"] += value.nbytes
        seat_of(value).ticket = None
        eviction.drop(value)

    # -- stores ---------------------------------------------------------------------------------------

    def _transfer_us(self, value: Value) -> float:
        """What it takes to write a byte, if it is not written yet, and to read it, as far as ops do not hide it."""
        assert self._pace is not None
        if seat_of(value).ticket is not None:
            return self._pace.in_us
        return self._pace.out_us + self._pace.in_us if not self._store_fails else float("inf")

    @contextlib.contextmanager
    def _waiting_for_store(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        assert self._pace is not None
        self._pace.waited_seconds += time.perf_counter() - start

    def _look_at_store(self) -> None:
        """Whether a write has failed since this room opened; the next scope tries again."""
        if self.store is not None and self._pace is not None:
            stats = self.store.stats()
            self._store_fails = stats.fallbacks > self._fallbacks
            self._pace.moved(stats)

    def _write(self, value: Value) -> None:
        """Have a value written. It stays in memory until it is let go."""
        assert self.store is not None
        assert value.tensor is not None
        seat = seat_of(value)
        with self._waiting_for_store():
            seat.ticket = self.store.put(_flat(value.tensor), str(value.origin))
        seat.store = self.store
        self.counts["written bytes"] += value.nbytes

    def _is_being_written(self, value: Value) -> bool:
        seat = value.seat
        if seat is None or seat.ticket is None or seat.store is None or seat.store.closed:
            return False
        return seat.store.is_resident(seat.ticket)

    def _offload(self, value: Value) -> None:
        seat = seat_of(value)
        if seat.ticket is None or seat.store is None or seat.store.closed:
            self._write(value)
        assert seat.ticket is not None
        assert seat.store is not None
        self.counts["offloaded"] += 1
        bisect.insort(self._waiting, (_asked_at(value), weakref.ref(value)), key=operator.itemgetter(0))
        self._leaving.append((weakref.ref(seat.ticket), seat.store))
        value.let_go()

    def _leaving_bytes(self) -> int:
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

    def _drop_fallen(self, nbytes: int) -> None:
        """Drop what could not be written and can be made again, as far as its memory is needed."""
        if not self._store_fails:
            return
        for ref in [*self._fallen, *(ref for _, ref in self._waiting)]:
            value = ref()
            seat = value.seat if value is not None else None
            if value is None or seat is None or seat.ticket is None or not seat.ticket.fell_back:
                continue
            if value.recipe is not None and self._free() < nbytes:
                self._drop(value)

    def _read_ahead(self) -> None:
        """Read what backward will ask for next, as long as there is room to spare."""
        spare = self._free() - self.limit_bytes // _SPARE
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

    def _give_back_ahead(self, nbytes: int) -> None:
        """Let go of what was read ahead, what will be asked for last first, as far as its memory is needed."""
        ahead = self.pool.ahead
        while ahead and self._free() < nbytes:
            ref = ahead.pop()
            value = ref()
            seat = value.seat if value is not None and value.tensor is None else None
            if value is None or seat is None or seat.ticket is None or seat.store is None:
                continue
            if seat.store.bytes_to_fetch(seat.ticket) == 0:
                seat.store.fetch(seat.ticket)  # the result is not kept; what is on the disk stays there
                bisect.insort(self._waiting, (_asked_at(value), ref), key=operator.itemgetter(0))

    # -- codecs ---------------------------------------------------------------------------------------

    def _compression_us(self, value: Value) -> float:
        """What it takes to compress and decompress a value, for each byte that this saves."""
        assert self.chooser is not None
        assert value.tensor is not None
        if self._free() < _workspace(value.nbytes):
            return float("inf")  # compressing takes memory too, and there is none
        measured = self.chooser.measurements(_flat(value.tensor), _kind(value))
        if not measured or value.nbytes / measured[0].ratio + _workspace(value.nbytes) > self._free():
            return float("inf")
        return 1e6 / measured[0].round_trip_bytes_per_second / (1 - 1 / measured[0].ratio)

    def _compress(self, value: Value) -> None:
        assert self.chooser is not None
        assert value.tensor is not None
        encoded = self.chooser.encode(_flat(value.tensor), _kind(value))
        if encoded is None:  # the sample was not like the whole
            return
        self.ledger.see_all(encoded.parts)
        self.counts["compressed"] += 1
        self.counts["compressed bytes"] += value.nbytes
        self.counts["compressed to bytes"] += encoded.nbytes
        seat_of(value).encoded = encoded
        value.let_go()

    # -- telling --------------------------------------------------------------------------------------

    def _error(self, nbytes: int, what: str) -> BudgetError:
        live = self.ledger.live_bytes
        held = [value for value in self.pool.all() if value.tensor is not None]
        holders: Counter[str] = Counter()
        for value in held:
            holders[str(value.origin)] += value.nbytes
        ours = sum(holders.values())
        listed = "".join(f"\n  {format_bytes(size):>12}  {name}" for name, size in holders.most_common(5))
        return BudgetError(
            f"{what} needs {format_bytes(nbytes)}, and {format_bytes(live)} of the budget of "
            f"{format_bytes(self.limit_bytes)} are in use, none of which can be evicted: {format_bytes(live - ours)} "
            f"are parameters, gradients, data and what running code holds, {format_bytes(ours)} saved values in use"
            f"{':' + listed if listed else ''}\n"
            f"Here a budget of {format_bytes(live + nbytes)} would be needed. Use a smaller batch, or a larger budget; "
            'stores=("disk",) can help if much of this is saved values.',
            budget_bytes=self.limit_bytes,
        )

    def report(self) -> RoomReport:
        """What happened so far."""
        counts = self.counts
        return RoomReport(
            budget_bytes=self.limit_bytes,
            peak_bytes=self.peak_bytes,
            values_dropped=counts["dropped"],
            bytes_dropped=counts["dropped bytes"],
            values_compressed=counts["compressed"],
            bytes_compressed=counts["compressed bytes"],
            bytes_compressed_to=counts["compressed to bytes"],
            values_offloaded=counts["offloaded"],
            bytes_written=counts["written bytes"],
            values_fetched=counts["fetched"],
            values_decompressed=counts["decompressed"],
            store=self.store.tier if self.store is not None else None,
        )


def _asked_at(value: Value) -> int:
    """When backward will ask for a value: what was saved last is asked for first."""
    seat = seat_of(value)
    return seat.saves[-1] if seat.saves else seat.made


def _flat(tensor: Tensor) -> Tensor:
    """All of the memory behind `tensor`, as one row of its elements."""
    storage = tensor.untyped_storage()
    dtype = tensor.dtype if storage.nbytes() % tensor.itemsize == 0 else torch.uint8
    return view_of(tensor, dtype, torch.Size((storage.nbytes() // dtype.itemsize,)), (1,), 0)


def _kind(value: Value) -> str:
    return value.origin.facts.name if value.origin is not None else ""


def _workspace(nbytes: int) -> int:
    """What a codec may take beside its result."""
    return min(4 * nbytes, 16 * PIECE)


_paces: weakref.WeakKeyDictionary[Store, Pace] = weakref.WeakKeyDictionary()


def _pace_of(store: Store) -> Pace | None:
    """How fast a store is, measured once; None while it cannot be written."""
    pace = _paces.get(store)
    if pace is None:
        try:
            pace = _paces[store] = Pace(measure_store(store, nbytes=8 * 2**20))
        except StoreError:
            if store.closed:
                raise
    return pace
