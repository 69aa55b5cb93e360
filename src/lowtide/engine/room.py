"""Room: a limit on all live bytes, held by evicting values before an op would exceed it.

Guaranteed: before any op runs, in forward or backward, user's or replayed, what is alive and what the op is
about to make are together within the limit, or `BudgetError` is raised. Only memory that nobody but the
engine holds is evicted, because nothing else would be gained: this also protects the arguments of a running
op. A value is evicted in whichever way costs the least time for each byte: dropped (its recipe makes it
again), compressed, or put into a store. Where the size of a result cannot be known before, it is guessed.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.nn import Parameter

from .._errors import BudgetError
from .._units import format_bytes
from ..codecs import Chooser, decode
from ..reporting.room_report import RoomReport
from ..stores import Store
from . import eviction, sizes
from .compressing import Compressing, workspace
from .effects import OpFacts
from .eviction import Pool, seat_of
from .ledger import Ledger
from .offloading import Offloading, is_being_written, pace_of
from .torch_private import is_alone, storage_key
from .values import Tensor, Value

LEDGER = Ledger()
POOL = Pool()
_LOCK = threading.RLock()  # scopes evict each other's values

_SIMPLE = frozenset((int, float, bool, type(None)))
_SOLE = 3  # references to a tensor that only its value holds: the value's, a local variable and an argument
_AHEAD = 64  # an eviction frees up to 1/64 of the limit more than is needed, so as not to be called for every op
_EARLY = 2  # writing begins when less than 1/2 of the limit is free: it takes its time
_QUEUE = 8  # and up to 1/8 of the limit waits to be written before it has to


class Room:
    """The limit of one scope. All rooms share one ledger and one pool: the memory is one."""

    def __init__(self, limit_bytes: int, store: Store | None, chooser: Chooser | None) -> None:
        self.limit_bytes = limit_bytes
        self.strict = True  # or only as far as there is something to evict
        self.ledger = LEDGER
        self.pool = POOL
        self.lock = _LOCK
        self.counts: Counter[str] = Counter()
        self.peak_bytes = 0
        pace = pace_of(store) if store is not None else None
        self.offloading: Offloading | None = None
        if store is not None and pace is not None:
            self.offloading = Offloading(store, pace, self.pool, self.counts)
        self.compressing = Compressing(chooser, self.ledger, self.counts) if chooser is not None else None
        self._evicting = False
        self._next_early = 0
        self._began = POOL.clock

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

    def passes(self) -> None:
        """A view goes by: it takes no memory."""

    def copies(self, part: Tensor) -> Callable[[float], None]:
        """A gradient is about to be copied (`part_gradients`): what is returned is called when its wait is over."""
        return _nothing

    # -- values ---------------------------------------------------------------------------------------

    @property
    def moves(self) -> bool:
        """Whether values can be evicted other than by dropping them."""
        return self.offloading is not None or self.compressing is not None

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
        if self.offloading is not None:
            self.offloading.read_ahead(self.limit_bytes, self._free())

    def bring_back(self, value: Value) -> bool:
        """Give a value its content again, if it is kept elsewhere."""
        seat = value.seat
        if seat is None or not seat.is_away:
            return False
        if seat.encoded is not None:
            self.clear(value.nbytes + workspace(value.nbytes), "a value to be decompressed")
            tensor = decode(seat.encoded)
            seat.encoded = None
            self.counts["decompressed"] += 1
        else:
            assert seat.store is not None
            assert seat.ticket is not None
            self.clear(seat.store.bytes_to_fetch(seat.ticket), "a value to be read back")
            if self.offloading is not None:
                tensor = self.offloading.fetch(seat.ticket, seat.store)
            else:  # another room put it there
                tensor = seat.store.fetch(seat.ticket)
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
        if strictly and self.strict and self.ledger.live_bytes + nbytes > self.limit_bytes:
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
        offloading = self.offloading
        tries = 0
        if offloading is not None:
            offloading.look()
        while self._free() < nbytes:
            tries += 1
            members, complete = (self.pool.all(), True) if tries > 8 else self.pool.sample()
            evicted = False
            for value in eviction.least_first(members, self._score):
                evicted |= self._evict_one(value)
                leaving = offloading.leaving_bytes() if offloading is not None else 0
                if self._free() + leaving >= wanted:
                    break
            if offloading is not None and self._free() < nbytes:
                offloading.settle(nbytes - self._free())
                for value in offloading.fallen():
                    if value.recipe is not None and self._free() < nbytes:
                        self._drop(value)
            if complete and not evicted:
                break
        if offloading is not None:
            offloading.give_back_ahead(lambda: self._free() >= nbytes)

    def _score(self, value: Value) -> float | None:
        tensor = value.tensor
        if tensor is None or sys.getrefcount(tensor) > _SOLE or not value.nbytes:
            return None
        if not is_alone(tensor) and not is_being_written(value):
            return None
        if value.recipe is not None:
            cost_us = eviction.cost_of_dropping(value)
            if self.offloading is not None:
                cost_us = min(cost_us, self.offloading.us_per_byte(value) * value.nbytes)
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
        if self.offloading is not None and (cost_us := self.offloading.us_per_byte(value)) < best:
            best, way = cost_us, self.offloading.evict
        if self.compressing is not None:
            cost_us = self.compressing.us_per_byte(value, self._free(), best)
            if cost_us < best:
                best, way = cost_us, self.compressing.evict
        return way

    def _move_early(self) -> None:
        """Write or compress what will be evicted sooner or later, while there is still room to do so.

        What is written stays in memory as long as it can, and can then be let go at once.
        """
        self._next_early = self.pool.clock + 8
        goal = self.limit_bytes // _QUEUE
        offloading = self.offloading
        if offloading is not None:
            offloading.look()
            goal -= offloading.in_flight_bytes()
        members, _ = self.pool.sample()
        for value in eviction.least_first(members, self._score):
            if goal <= 0:
                return
            way = self._cheapest(value)
            if offloading is not None and way == offloading.evict:
                if seat_of(value).ticket is not None:
                    continue
                offloading.write(value)
            elif way is not None and way != self._drop and self._free() < self.limit_bytes // 4:
                way(value)  # compression is not hidden behind ops: not before it is likely to be needed
            goal -= value.nbytes

    def _drop(self, value: Value) -> None:
        self.counts["dropped"] += 1
        self.counts["dropped bytes"] += value.nbytes
        seat_of(value).ticket = None
        eviction.drop(value)

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
            f"Here a budget of {format_bytes(live + nbytes)} would be needed. Use a smaller batch, or a larger budget "
            "(lowtide.plan(model, batch, budget) tells the smallest that a plan can do with); "
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
            store=self.offloading.store.tier if self.offloading is not None else None,
        )


def _nothing(seconds: float) -> None:
    pass
