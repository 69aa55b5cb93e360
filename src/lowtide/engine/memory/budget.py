"""The memory budget: a limit on the live bytes of one device, kept by evicting values before an op would exceed it.

Before any op runs, in forward or backward, recorded or replayed, the live bytes and the bytes that the op is about to
allocate, its workspace included, are within the limit, or `BudgetError` is raised. Only memory that the engine alone
holds is evicted: freeing other memory gains nothing, and the arguments of a running op are protected. A value is
evicted in the way that costs the least time per byte: dropped (its recipe recomputes it), compressed, or offloaded. If
the size of a result or workspace cannot be known in advance, it is estimated.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import Parameter

from ..._errors import BudgetError
from ..._units import format_budget, format_bytes
from ...codecs import Chooser
from ...records.budget_report import BudgetReport
from ...stores import Store
from ...torch_compat import is_unshared, running_node_number, storage_key
from ..ops import output_sizes, rng
from ..ops.facts import OpFacts
from ..ops.peak_inside import PeakProbe
from ..values.value import Tensor, Value, describe
from . import eviction
from .compress import Compression
from .device_memory import DeviceMemory
from .eviction import residency_of
from .offload import Offloading, is_being_written
from .workspaces import T, estimated_bytes

_SIMPLE = frozenset((int, float, bool, type(None)))
_SOLE_REFERENCES = 3  # to a tensor that only its value holds: the value's, a local variable and an argument
_EXTRA_EVICTED = 64
"""An eviction frees up to 1/64 of the limit more than needed. Doubled (1/128): evictions run more often."""
_RESERVE = 1000
"""Evictions keep 1/1000 of the limit free for tensors that no op returns: torch makes a tensor of the number in `x * 2`
and holds it until backward. Doubled (1/2000): small models with many ops may exceed the limit by a few bytes."""
_START_WRITING = 2
"""Writing starts when less than 1/2 of the limit is free. Doubled (1/4): less traffic, more waiting."""
_WRITE_QUEUE = 8
"""Up to 1/8 of the limit is written early. Doubled (1/16): less traffic, more waiting."""
_EARLY_INTERVAL_OPS = 8
"""Ops between two attempts to write early. Doubled: less work per op, later writes."""
_LISTED_VALUES = 5
_PLAN_NAMES_A_BUDGET = "lowtide.plan(model, batch, budget) names a budget that works."


class BudgetObserver(Protocol):
    """Listens to a memory budget: a profile of the step."""

    def op_ran(self, live_bytes: int) -> None:
        """An op has run. `live_bytes` include its workspace, but no prefetched values."""

    def formula_begins(self, live_bytes: int) -> Callable[[int], None]:
        """A gradient formula begins whose ops are not observed. The result is called with the bytes that it needed."""

    def backward_op_watched(self, seconds: float) -> None:
        """An op of backward has run; the budget took this long in addition."""

    def gradient_copied(self, part: Tensor) -> Callable[[float], None]:
        """A gradient is about to be copied. The result is called with the seconds spent, when the copy is freed."""

    def value_held(self, tensor: Tensor) -> None:
        """A value was recomputed or fetched, or `tensor` is a part of its compressed form."""

    def unpack_begins(self) -> None:
        """A backward node unpacks a value."""

    def unpack_ends(self, value: Value, save: int, live_bytes: int) -> None:
        """The value is in memory. `save` is the number of the saved tensor. `live_bytes` as for `op_ran`."""


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
        self.on_write: Callable[[OpFacts, tuple[Any, ...], dict[str, Any]], None] | None = None
        """Called before an op of backward that writes to its arguments."""
        self.counts: Counter[str] = Counter()
        self.peak_bytes = 0
        self.workspace_bytes = 0
        """Workspace of the op that ran last. Used right after it, in the same thread."""
        pace = memory.pace_of(store) if store is not None else None
        self.offloading: Offloading | None = None
        if store is not None and pace is not None:
            self.offloading = Offloading(store, pace, self.pool, self.counts)
        self.compression = Compression(chooser, self._hold, self.counts) if chooser is not None else None
        self._formula: _Formula | None = None
        self._evicting = False
        self._next_early = 0
        self._opened_at = self.pool.clock

    # -- ops ------------------------------------------------------------------------------------------

    def before(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], strictly: bool = True) -> Any:
        """Evict until an op can run within the limit. Return a token for `after`."""
        if self._formula is not None:
            self.formula_ended()
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
                key.append(a.dtype)
                try:
                    key.append(a.shape)
                    # Also if contiguous: strides of dims of size 1 can decide whether a kernel treats images as
                    # channels last, and so its workspace.
                    key.append(a.stride())
                    storage = a.untyped_storage()
                except (NotImplementedError, RuntimeError):  # nested and sparse tensors
                    key.append(a.numel())
                    ledger.count(a)
                    continue
                row = rows.get(storage_key(storage))
                if row is None or row.nbytes != storage.nbytes():
                    if a.is_meta:
                        return None  # no memory
                    ledger.count(a)
            elif kind in _SIMPLE:
                key.append(a)
            elif kind is list and a and type(a[0]) is int:
                key.append(tuple(a))
            else:
                ledger.count_all((a,))
                key.append(output_sizes.shapes_of((a,)))
        if kwargs:
            if output_sizes.makes_meta_tensors(kwargs):
                return None
            key.append(output_sizes.shapes_of(tuple(kwargs.items())))
        return self._make_room_for(tuple(key), facts, args, kwargs, strictly)

    def _make_room_for(
        self, signature: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], strictly: bool
    ) -> Any:
        """Make room for the results and the workspace of an op. Return the token of `before`."""
        nbytes, certain = output_sizes.output_bytes(signature, facts, args, kwargs)
        workspaces = self.memory.workspaces
        workspace_bytes = workspaces.known_bytes(signature)
        # A generator state is captured before the kernel allocates.
        capture_bytes = max(0, rng.state_bytes(self.memory.device.type) - nbytes) if facts.seeded else 0
        room = nbytes + max(workspace_bytes or 0, capture_bytes)
        if workspace_bytes is None:  # an estimate is no reason to stop
            self.make_room(room + estimated_bytes(facts, args, nbytes), facts.name, strictly=False)
        if room:
            self.make_room(room, facts.name, strictly and certain)
        if capture_bytes:
            workspaces.measured(signature, capture_bytes)
        return signature, nbytes, self.ledger.live_bytes, workspace_bytes is None or not certain

    def call(self, kernel: Callable[[], T], token: Any) -> T:
        """Call a kernel between `before` and `after`. Measure its workspace if it is not known."""
        if token is None:
            return kernel()
        signature, _, _, is_measured = token
        workspaces = self.memory.workspaces
        out = workspaces.measured_call(signature, kernel) if is_measured else kernel()
        self.workspace_bytes = workspaces.known_bytes(signature) or 0
        return out

    def after(self, out: Any, token: Any) -> None:
        """Count the results of an op."""
        if token is None:
            return
        ledger = self.ledger
        if type(out) is Tensor:
            ledger.count(out)
        else:
            ledger.count_all(out if isinstance(out, (tuple, list)) else (out,))
        signature, expected, before, _ = token
        live = ledger.live_bytes
        if live - before > expected:
            output_sizes.correct(signature, live - before)
        live += self.memory.workspaces.known_bytes(signature) or 0
        if live > self.peak_bytes:
            self.peak_bytes = live
        if self.observer is not None:
            self.observer.op_ran(live - self._prefetched_bytes())

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], strictly: bool = True) -> Any:
        """Run an op of backward. Raise only if `strictly`; otherwise exceed the limit if nothing can be evicted."""
        start = time.perf_counter()
        if facts.writes and self.on_write is not None and facts.writes_now(args):
            self.on_write(facts, args, kwargs)
        token = self.before(facts, args, kwargs, strictly)
        called = time.perf_counter()
        out = self.call(lambda: facts.call(*args, **kwargs), token)
        returned = time.perf_counter()
        self.after(out, token)
        if self.observer is not None:
            self.observer.backward_op_watched(called - start + time.perf_counter() - returned)
        return out

    def count(self, tensor: Tensor) -> None:
        """Count a gradient that a formula has returned."""
        self.formula_ended()
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
                f"{format_bytes(self.limit_bytes)}. At least {format_budget(live)} is needed, and more for activations "
                f"and gradients. {_PLAN_NAMES_A_BUDGET} Or use a smaller model or batch.",
                budget_bytes=self.limit_bytes,
                at_least_bytes=live,
            )

    def view_ran(self) -> None:
        """Tell the observer of a view op in backward, which allocates nothing."""
        if self.observer is not None:
            self.observer.backward_op_watched(0.0)

    def formula_begins(self, nbytes: int, held: Tensor | None) -> None:
        """Make room for a gradient formula whose ops are not observed. It needs about `nbytes`, and may hold `held`."""
        self.make_room(nbytes, "a gradient formula", strictly=False)
        if self.observer is not None:
            needed = self.observer.formula_begins(self.ledger.live_bytes - self._prefetched_bytes())
            self._formula = _Formula(self.memory.device, held, needed, nbytes)

    def formula_ended(self) -> None:
        """The gradient formula has returned or unpacks another value, if one was running."""
        formula, self._formula = self._formula, None
        if formula is not None:
            formula.next_event()

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
        self._hold(tensor)
        value.own(tensor, evictable=True)
        eviction.recomputed(value)
        residency = residency_of(value)
        residency.touched = self.pool.clock
        if not residency.made and value.origin is not None:
            residency.made = self._opened_at + value.origin.number
        self.pool.add(value)

    def unpack_begins(self) -> None:
        """Tell the observer that a backward node unpacks a value."""
        self.formula_ended()
        if self.observer is not None:
            self.observer.unpack_begins()

    def unpack_ends(self, value: Value, save: int) -> None:
        """Note the position of backward, and prefetch what it will unpack next."""
        residency = value.residency
        if residency is not None:
            residency.touched = self.pool.clock
            if residency.saves:
                self.pool.front = residency.saves.pop()
        if self.offloading is not None:
            self.offloading.prefetch_next(self.limit_bytes, self._free_bytes())
        if self.observer is not None:
            self.observer.unpack_ends(value, save, self.ledger.live_bytes - self._prefetched_bytes())

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
        self.own(value, tensor)
        return True

    def _hold(self, tensor: Tensor) -> None:
        """Count a tensor that the engine holds for a value."""
        self.ledger.count(tensor)
        if self.observer is not None:
            self.observer.value_held(tensor)

    def _prefetched_bytes(self) -> int:
        """Return the live bytes of values that were prefetched and not yet fetched. They have no tensor to observe."""
        return self.offloading.prefetched_bytes() if self.offloading is not None else 0

    # -- eviction ------------------------------------------------------------------------------------

    def make_room(self, nbytes: int, what: str, strictly: bool = True) -> None:
        """Evict until `nbytes` more fit. `what` names the allocation in the error."""
        excess = nbytes - self._free_bytes()
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
        return self.limit_bytes - self.limit_bytes // _RESERVE - self.ledger.live_bytes

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
        ours = sum(value.nbytes for value in held)
        largest = sorted(held, key=lambda value: -value.nbytes)[:_LISTED_VALUES]
        listed = "".join(f"\n  {format_bytes(value.nbytes):>10}  {_describe(value)}" for value in largest)
        return BudgetError(
            f"{what} needs {format_bytes(nbytes)}, and {format_bytes(live)} of the budget of "
            f"{format_bytes(self.limit_bytes)} are in use, none of which can be evicted: {format_bytes(live - ours)} "
            f"are parameters, gradients, data and tensors of running code, {format_bytes(ours)} are saved values in use"
            f"{':' + listed if listed else ''}\n"
            f"Here at least {format_budget(live + nbytes)} is needed, and later ops may need more. "
            f'{_PLAN_NAMES_A_BUDGET} Or use a smaller batch; stores=("disk",) can help if much of this is saved '
            "values.",
            budget_bytes=self.limit_bytes,
            at_least_bytes=live + nbytes,
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


class _Formula:
    """A gradient formula whose ops are not observed, from its unpack to the next event of backward.

    Its allocations are measured until it frees `held`. If that cannot be seen, the estimate counts.
    """

    def __init__(
        self, device: torch.device, held: Tensor | None, needed: Callable[[int], None], estimated_bytes: int
    ) -> None:
        self._needed: Callable[[int], None] | None = needed
        self._estimated_bytes = estimated_bytes
        self._node = running_node_number()
        self._probe = PeakProbe(device)
        self._held = None if held is None else weakref.ref(held, self._returned)
        if held is not None:
            self._probe.start()

    def _returned(self, _: Any) -> None:
        # The probe belongs to the running node.
        rise = self._probe.stop() if running_node_number() == self._node else None
        if rise is not None and rise.highest_bytes:  # otherwise the formula may not have begun
            self._end(rise.highest_bytes)

    def next_event(self) -> None:
        """Another event of backward begins."""
        self._held = None  # autograd ends the probe with the node
        self._end(self._estimated_bytes)

    def _end(self, nbytes: int) -> None:
        needed, self._needed = self._needed, None
        if needed is not None:
            needed(nbytes)


def _describe(value: Value) -> str:
    """Return such as "aten.mm.default in module 'mlp' (op 7): a float32 tensor of shape (8, 64)"."""
    made_by = "a tensor from outside" if value.origin is None else str(value.origin)
    return made_by if value.tensor is None else f"{made_by}: {describe(value.tensor)}"


def _ignore(seconds: float) -> None:
    pass
