"""Following a plan's values that wait elsewhere: in a store, or packed by a codec, until backward needs them.

A value is put when autograd saves it or a recipe refers to it, and is written while ops go on. Before the op that the
plan names it has been written: if the store is slower than it was taken to be, forward waits there, so that the peak
is the planned one and only the time is not. What cannot be written (a full disk) stays in memory; the store warns.
Packing is done at once.

In backward a value is read when it is needed, or ahead of that, from the moment that the plan names: when another op's
value is first fetched, or when backward begins. Its memory is taken then, and not before. A read ahead is a hint: one
that cannot be, or that fails, is no error before the value is needed, and is then read again.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING

import torch

from ..codecs import Encoded
from ..planning import Packing, Plan
from ..planning.packing import suitable_packings
from ..planning.reading import WHEN_BACKWARD_BEGINS
from ..stores import Store, Ticket
from .compressing import pack, unpack
from .eviction import seat_of
from .offloading import wait_until_written
from .torch_private import without_modes
from .values import Tensor, Value, flat
from .watching import Watch

if TYPE_CHECKING:
    from .planned import Gauge


class Ferry:
    """The traffic of one planned step with its store and its codecs."""

    def __init__(self, plan: Plan, store: Store | None, gauge: Gauge | None) -> None:
        self.store = store
        self._written_by = plan.departures
        self._compress = frozenset(plan.compress)
        self._packings = plan.packings
        self._suitable: dict[tuple[torch.dtype, int], list[Packing]] = {}
        self._gauge = gauge
        self._due: dict[int, list[weakref.ref[Ticket]]] = {}
        self._passed = -1  # the op that was made last
        self._read_at: dict[int, list[int]] = {}  # by event: the ops whose values are read then
        for j, event in sorted(plan.reads_ahead.items(), reverse=True):  # what was made last is needed first
            self._read_at.setdefault(event, []).append(j)
        self._ahead: dict[int, list[weakref.ref[Value]]] = {j: [] for j in plan.reads_ahead}

    def takes(self, value: Value, tensor: Tensor) -> bool:
        """Whether the plan wants this value, of which `tensor` is a view, to wait elsewhere."""
        origin = value.origin
        # What FSDP gathers it also frees, under the hands of whoever still reads it; and memory that nothing has
        # written yet is sometimes saved by the op that is about to write it.
        if value.recipe is not None or origin is None or origin.facts.regathers or origin.facts.blank:
            return False
        if origin.number in self._compress:
            return bool(self._packings_of(value, tensor))
        return self.store is not None and origin.number in self._written_by

    def packs_exactly(self, value: Value, tensor: Tensor) -> bool:
        """Whether what it takes will wait packed, by codecs that give back every bit."""
        packed = value.origin is not None and value.origin.number in self._compress
        return packed and all(packing.exact for packing in self._packings_of(value, tensor))

    def _packings_of(self, value: Value, tensor: Tensor) -> list[Packing]:
        key = tensor.dtype, value.nbytes
        found = self._suitable.get(key)
        if found is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            # Whether it is binary is in its content, which codecs look at themselves.
            found = self._suitable[key] = suitable_packings(self._packings, dtype, value.nbytes, binary=True)
        return found

    @staticmethod
    def _workspace(packed: Encoded | None, value: Value, packings: list[Packing]) -> int:
        """What packing or unpacking has taken meanwhile."""
        used = (packing for packing in packings if packed is not None and packing.codec == packed.codec)
        return max((packing.workspace(value.nbytes) for packing in used), default=0)

    def put(self, value: Value, tensor: Tensor) -> None:
        """Have a value packed or written, unless it is already, or on its way."""
        seat = seat_of(value)
        if seat.is_away or value.tensor is not None:
            return
        assert value.origin is not None
        if value.origin.number in self._compress:
            packings = self._packings_of(value, tensor)
            with without_modes():
                pack(value, tensor, [packing.codec for packing in packings])
            if self._gauge is not None:
                parts = seat.encoded.parts if seat.encoded is not None else ()
                self._gauge.saw(parts, self._workspace(seat.encoded, value, packings))
            return
        assert self.store is not None
        with without_modes():  # its own ops are not the step's
            seat.ticket = self.store.put(flat(tensor), str(value.origin))
        seat.store = self.store
        if value.origin.number in self._ahead:
            self._ahead[value.origin.number].append(weakref.ref(value))
        due = self._written_by[value.origin.number]
        if due <= self._passed + 1:
            wait_until_written(self.store, seat.ticket)
        else:
            self._due.setdefault(due, []).append(weakref.ref(seat.ticket))

    def made(self, number: int) -> None:
        """An op has been made: before the next one some values have to be written."""
        self._passed = number
        for ref in self._due.pop(number + 1, ()):
            ticket = ref()
            if ticket is not None and self.store is not None:
                wait_until_written(self.store, ticket)

    def bring_back(self, value: Value) -> bool:
        """Unpack a value, or read it from the store, if it is there."""
        seat = value.seat
        if seat is not None and seat.encoded is not None:
            packed = seat.encoded  # until the value itself has been counted
            with without_modes():
                unpack(value)
            if self._gauge is not None and value.tensor is not None:
                packings = self._packings_of(value, value.tensor)
                self._gauge.saw(value.tensor, self._workspace(packed, value, packings))
            del packed
            return True
        if seat is None or seat.ticket is None or seat.store is None:
            return False
        tensor = seat.store.fetch(seat.ticket)
        value.own(tensor)
        if self._gauge is not None:
            self._gauge.saw(tensor)
        if self._read_at and value.origin is not None:
            self._read_ahead(value.origin.number)
        return True

    def backward_begins(self) -> None:
        """The first backward pass through the step is about to run."""
        if self._read_at:
            self._read_ahead(WHEN_BACKWARD_BEGINS)

    def _read_ahead(self, event: int) -> None:
        """Have read what the plan wants read from now on, as far as it is still in the store and wanted."""
        for op in self._read_at.pop(event, ()):
            for ref in self._ahead.pop(op):
                value = ref()
                seat = value.seat if value is not None and value.tensor is None else None
                if seat is None or seat.ticket is None or seat.store is None or seat.store.closed:
                    continue
                # A mode may have stepped aside for a formula: the memory that is taken here is seen nevertheless.
                with contextlib.nullcontext() if self._gauge is None else Watch(self._gauge):
                    seat.store.prefetch(seat.ticket)
