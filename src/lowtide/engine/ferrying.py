"""Following a plan's offloading: values go to a store in forward and are read back when backward needs them.

A value is put when autograd saves it or a recipe refers to it, and is written while ops go on. Before the op that the
plan names it has been written: if the store is slower than it was taken to be, forward waits there, so that the peak
is the planned one and only the time is not. What cannot be written (a full disk) stays in memory; the store warns.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..stores import Store, Ticket
from .eviction import seat_of
from .offloading import wait_until_written
from .torch_private import without_modes
from .values import Tensor, Value, flat

if TYPE_CHECKING:
    from .planned import Gauge


class Ferry:
    """The traffic of one planned step with its store."""

    def __init__(self, store: Store, written_by: Mapping[int, int], gauge: Gauge | None) -> None:
        self.store = store
        self._written_by = written_by
        self._gauge = gauge
        self._due: dict[int, list[weakref.ref[Ticket]]] = {}
        self._passed = -1  # the op that was made last

    def takes(self, value: Value) -> bool:
        """Whether the plan wants this value to wait in the store."""
        origin = value.origin
        # What FSDP gathers it also frees, under the hands of whoever still reads it.
        return (
            value.recipe is None
            and origin is not None
            and origin.number in self._written_by
            and not origin.facts.regathers
        )

    def put(self, value: Value, tensor: Tensor) -> None:
        """Have a value written, unless it is already on its way."""
        seat = seat_of(value)
        if seat.ticket is not None:
            return
        assert value.origin is not None
        with without_modes():  # its own ops are not the step's
            seat.ticket = self.store.put(flat(tensor), str(value.origin))
        seat.store = self.store
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
            if ticket is not None:
                wait_until_written(self.store, ticket)

    def bring_back(self, value: Value) -> bool:
        """Read a value that is in the store, if it is."""
        seat = value.seat
        if seat is None or seat.ticket is None or seat.store is None:
            return False
        tensor = seat.store.fetch(seat.ticket)
        value.own(tensor)
        if self._gauge is not None:
            self._gauge.saw(tensor)
        return True
