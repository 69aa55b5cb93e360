"""The memory budget: a limit on the live bytes of one device, kept by evicting values before an op would exceed it.

Before any op runs, in forward or backward, recorded or replayed, the live bytes and the bytes that the op is about to
allocate are within the limit, or `BudgetError` is raised. Only memory that the engine alone holds is evicted: freeing
other memory gains nothing, and the arguments of a running op are protected. A value is evicted in the way that costs
the least time per byte: dropped (its recipe recomputes it), compressed, or offloaded. If the size of a result
cannot be known in advance, it is estimated.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from torch.nn import Parameter

from ..._errors import BudgetError
from ..._units import format_bytes
from ...codecs import Chooser
from ...records.budget_report import BudgetReport
from ...stores import Store
from ...torch_compat import is_unshared, storage_key
from ..ops import output_sizes
from ..ops.facts import OpFacts
from ..values.value import Tensor, Value
from . import eviction
from .compress import Compression
from .device_memory import DeviceMemory
from .eviction import residency_of
from .offload import Offloading, is_being_written

_SIMPLE = frozenset((int, float, bool, type(None)))
_SOLE_REFERENCES = 3  # to a tensor that only its value holds: the value's, a local variable and an argument
_EXTRA_EVICTED = 64
"""An eviction frees up to 1/64 of the limit more than needed. Doubled (1/128): evictions run more often."""
_START_WRITING = 2
"""Writing starts when less than 1/2 of the limit is free. Doubled (1/4): less traffic, more waiting."""
_WRITE_QUEUE = 8
"""Up to 1/8 of the limit is written early. Doubled (1/16): less traffic, more waiting."""
_EARLY_INTERVAL_OPS = 8
"""Ops between two attempts to write early. Doubled: less work per op, later writes."""


class BudgetObserver(Protocol):
    """Listens to a memory budget: a profile of the step."""

    def op_ran(self, live_bytes: int) -> None:
        """An op has run."""

    def backward_op_watched(self, seconds: float) -> None:
        """An op of backward has run; the budget took this long in addition."""

    def gradient_copied(self, part: Tensor) -> Callable[[float], None]:
        """A gradient is about to be copied. The result is called with the seconds spent, when the copy is freed."""

    def value_owned(self, tensor: Tensor) -> None:
        """A value was recomputed or fetched."""

    def unpack_begins(self) -> None:
        """A backward node unpacks a value."""

    def unpack_ends(self, value: Value, live_bytes: int) -> None:
        """The value is in memory."""


class MemoryBudget:
    """The limit of one scope. All budgets of a device share its `DeviceMemory`."""

    def __init__(
        self,
        memory: DeviceMemory,
        limit_bytes: int,
        store: Store | None = None,
        chooser: Chooser | None = None,
        observer: BudgetObserver | None = None,
    ) -> None:
        self.memory = memory
        self.limit_bytes = limit_bytes
        self.ledger = memory.ledger
        self.pool = memory.pool
        self.lock = memory.lock
        self.observer = observer
        self.counts: Counter[str] = Counter()
        self.peak_bytes = 0
        pace = memory.pace_of(store) if store is not None else None
        self.offloading: Offloading | None = None
        if store is not None and pace is not None:
            self.offloading = Offloading(store, pace, self.pool, self.counts)
        self.compression = Compression(chooser, self.ledger, self.counts) if chooser is not None else None
        self._evicting = False
        self._next_early = 0
        self._opened_at = self.pool.clock

    # -- ops ------------------------------------------------------------------------------------------

    def before(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], strictly: bool = True) -> Any:
        """Evict until an op can run within the limit. Return a token for `after`."""
        if facts.rebinds:
            return None
        self.pool.clock += 1
        # Written without calls, because it runs for every op: count new arguments, and build the signature of the op.
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
                    ledger.count(a)
            elif kind in _SIMPLE:
                key.append(a)
            elif kind is list and a and type(a[0]) is int:
                key.append(tuple(a))
            else:
                ledger.count_all((a,))
                key.append(output_sizes.shapes_of((a,)))
        if kwargs:
            key.append(output_sizes.shapes_of(tuple(kwargs.items())))
        signature = tuple(key)
        nbytes, certain = output_sizes.output_bytes(signature, facts, args, kwargs)
        if nbytes:
            self.make_room(nbytes, facts.name, strictly and certain)  # an estimate is no reason to stop
        return signature, nbytes, ledger.live_bytes

    def after(self, out: Any, token: Any) -> None:
        """Count the results of an op."""
        if token is None:
            return
        ledger = self.ledger
        if type(out) is Tensor:
            ledger.count(out)
        else:
            ledger.count_all(out if isinstance(out, (tuple, list)) else (out,))
        signature, expected, before = token
        live = ledger.live_bytes
        if live - before > expected:
            output_sizes.correct(signature, live - before)
        if live > self.peak_bytes:
            self.peak_bytes = live
        if self.observer is not None:
            self.observer.op_ran(live)

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], strictly: bool = True) -> Any:
        """Run an op of backward. Raise only if `strictly`; otherwise exceed the limit if nothing can be evicted."""
        start = time.perf_counter()
        token = self.before(facts, args, kwargs, strictly)
        called = time.perf_counter()
        out = facts.call(*args, **kwargs)
        returned = time.perf_counter()
        self.after(out, token)
        if self.observer is not None:
            self.observer.backward_op_watched(called - start + time.perf_counter() - returned)
        return out

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that the engine has allocated."""
        self.ledger.count(tensor)

    def make_room_to_start(self) -> None:
        """Evict what other scopes left, and raise `BudgetError` if parameters and data alone exceed the limit."""
        live = self.peak_bytes = self.ledger.live_bytes
        if live > self.limit_bytes:
            self.make_room(0, "", strictly=False)
            live = self.ledger.live_bytes
        if live > self.limit_bytes:
            raise BudgetError(
                f"parameters and data already use {format_bytes(live)}, more than the budget of "
                f"{format_bytes(self.limit_bytes)}. Use a larger budget, or a smaller model or batch.",
                budget_bytes=self.limit_bytes,
            )

    def view_ran(self) -> None:
        """Tell the observer of a view op in backward, which allocates nothing."""
        if self.observer is not None:
            self.observer.backward_op_watched(0.0)

    def gradient_copied(self, part: Tensor) -> Callable[[float], None]:
        """Tell the observer of a gradient copy. The result is called when the copy is freed."""
        return _ignore if self.observer is None else self.observer.gradient_copied(part)

    # -- values ---------------------------------------------------------------------------------------

    @property
    def can_move(self) -> bool:
        """Whether values can be offloaded or compressed."""
        return self.offloading is not None or self.compression is not None

    def admit(self, value: Value) -> None:
        """Add a value that autograd saves and that may be evicted."""
        pool = self.pool
        residency = residency_of(value)
        residency.touched = residency.made = pool.front = pool.clock
        residency.saves.append(pool.clock)
        pool.add(value)

    def own(self, value: Value, tensor: Tensor) -> None:
        """Give a recomputed or fetched value its tensor."""
        if self.observer is not None:
            self.observer.value_owned(tensor)
        value.own(tensor, evictable=True)
        eviction.recomputed(value)
        residency = residency_of(value)
        residency.touched = self.pool.clock
        if not residency.made and value.origin is not None:
            residency.made = self._opened_at + value.origin.number
        self.pool.add(value)

    def unpack_begins(self) -> None:
        """Tell the observer that a backward node unpacks a value."""
        if self.observer is not None:
            self.observer.unpack_begins()

    def unpack_ends(self, value: Value) -> None:
        """Note the position of backward, and prefetch what it will unpack next."""
        residency = value.residency
        if residency is not None:
            residency.touched = self.pool.clock
            if residency.saves:
                self.pool.front = residency.saves.pop()
        if self.offloading is not None:
            self.offloading.prefetch_next(self.limit_bytes, self._free_bytes())
        if self.observer is not None:
            self.observer.unpack_ends(value, self.ledger.live_bytes)

    def fetch(self, value: Value) -> bool:
        """Give a value its tensor if it is offloaded or compressed. Return whether it was."""
        residency = value.residency
        if residency is None or residency.placement is None:
            return False
        placement = residency.placement
        if placement.is_compressed:
            self.make_room(placement.bytes_to_get(), "a value to be decompressed")
            tensor = placement.get()
            self.counts["decompressed"] += 1
        else:
            self.make_room(placement.bytes_to_get(), "a value to be fetched")
            tensor = self.offloading.fetch(placement) if self.offloading is not None else placement.get()
        if placement.is_compressed or placement.has_failed:
            residency.placement = None
        self.ledger.count(tensor)
        self.own(value, tensor)
        return True

    # -- eviction ------------------------------------------------------------------------------------

    def make_room(self, nbytes: int, what: str, strictly: bool = True) -> None:
        """Evict until `nbytes` more fit. `what` names the allocation in the error."""
        excess = self.ledger.live_bytes + nbytes - self.limit_bytes
        if self._evicting or excess <= 0:
            if self.can_move and excess > -self.limit_bytes // _START_WRITING and self.pool.clock >= self._next_early:
                with self.lock:
                    self._guarded(self._move_early)
            return
        with self.lock:
            self._guarded(lambda: self._evict(nbytes))
        if strictly and self.ledger.live_bytes + nbytes > self.limit_bytes:
            raise self._error(nbytes, what)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an eviction. The ops that it runs itself must not start another one."""
        if self._evicting:
            return
        self._evicting = True
        try:
            action()
        finally:
            self._evicting = False

    def _free_bytes(self) -> int:
        return self.limit_bytes - self.ledger.live_bytes

    def _evict(self, nbytes: int) -> None:
        """Evict the cheapest values until `nbytes` are free, and a little more. Wait for writes where needed."""
        wanted = nbytes + self.limit_bytes // _EXTRA_EVICTED
        offloading = self.offloading
        tries = 0
        if offloading is not None:
            offloading.update()
        while self._free_bytes() < nbytes:
            tries += 1
            members, complete = (self.pool.all(), True) if tries > 8 else self.pool.sample()
            evicted = False
            for value in eviction.least_first(members, self._score):
                evicted |= self._evict_one(value)
                leaving = offloading.unwritten_bytes() if offloading is not None else 0
                if self._free_bytes() + leaving >= wanted:
                    break
            if offloading is not None and self._free_bytes() < nbytes:
                offloading.wait_for_writes(nbytes - self._free_bytes())
                for value in offloading.failed():
                    if value.recipe is not None and self._free_bytes() < nbytes:
                        self._drop(value)
            if complete and not evicted:
                break
        if offloading is not None:
            offloading.drop_prefetched(lambda: self._free_bytes() >= nbytes)

    def _score(self, value: Value) -> float | None:
        tensor = value.tensor
        if tensor is None or sys.getrefcount(tensor) > _SOLE_REFERENCES or not value.nbytes:
            return None
        if not is_unshared(tensor) and not is_being_written(value):
            return None
        if value.recipe is not None:
            cost_us = eviction.cost_of_dropping(value, self.pool)
            if self.offloading is not None:
                cost_us = min(cost_us, self.offloading.us_per_byte(value) * value.nbytes)
        elif self.can_move:
            cost_us = value.nbytes * 1e-3  # 1 GB/s until measured
        else:
            return None
        return eviction.score(value, cost_us, self.pool)

    def _evict_one(self, value: Value) -> bool:
        """Evict a value in the cheapest way. Return whether its memory is free."""
        way = self._cheapest(value)
        if way is None:
            return False
        way(value)
        return value.tensor is None

    def _cheapest(self, value: Value) -> Callable[[Value], None] | None:
        """Return the way to evict a value that takes the least time per byte saved, or None."""
        best, way = float("inf"), None
        if value.recipe is not None:
            best, way = eviction.cost_of_dropping(value, self.pool) / value.nbytes, self._drop
        if self.offloading is not None and (cost_us := self.offloading.us_per_byte(value)) < best:
            best, way = cost_us, self.offloading.evict
        if self.compression is not None:
            cost_us = self.compression.us_per_byte(value, self._free_bytes(), best)
            if cost_us < best:
                best, way = cost_us, self.compression.evict
        return way

    def _move_early(self) -> None:
        """Write or compress values that will be evicted later, while there is memory to do so.

        A written value stays in memory as long as possible. Evicting it then takes no time.
        """
        self._next_early = self.pool.clock + _EARLY_INTERVAL_OPS
        goal = self.limit_bytes // _WRITE_QUEUE
        offloading = self.offloading
        if offloading is not None:
            offloading.update()
            goal -= offloading.in_flight_bytes()
        members, _ = self.pool.sample()
        for value in eviction.least_first(members, self._score):
            if goal <= 0:
                return
            way = self._cheapest(value)
            if offloading is not None and way == offloading.evict:
                if residency_of(value).placement is not None:
                    continue
                offloading.write(value)
            elif way is not None and way != self._drop and self._free_bytes() < self.limit_bytes // 4:
                way(value)  # ops do not hide compression, so it waits until memory is short
            goal -= value.nbytes

    def _drop(self, value: Value) -> None:
        self.counts["dropped"] += 1
        self.counts["dropped bytes"] += value.nbytes
        residency_of(value).placement = None
        eviction.drop(value)

    # -- reports --------------------------------------------------------------------------------------

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
            f"are parameters, gradients, data and tensors of running code, {format_bytes(ours)} are saved values in use"
            f"{':' + listed if listed else ''}\n"
            f"Here a budget of {format_bytes(live + nbytes)} would be needed. Use a smaller batch, or a larger budget "
            "(lowtide.plan(model, batch, budget) names the smallest one for which there is a plan); "
            'stores=("disk",) can help if much of this is saved values.',
            budget_bytes=self.limit_bytes,
        )

    def report(self) -> BudgetReport:
        """Return what happened so far."""
        counts = self.counts
        return BudgetReport(
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


def _ignore(seconds: float) -> None:
    pass
