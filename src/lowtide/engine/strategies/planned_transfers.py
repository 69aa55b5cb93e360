"""The transfers of a planned step: values in a store, or compressed, until backward needs them.

A value is put when autograd saves it or a recipe refers to it, and is written while ops run. Before the op that the
plan names it has been written: if the store is slower than expected, forward waits there. The peak is then as
planned, and only the time is not. A value that cannot be written (a full disk) stays in memory; the store warns.
Compression is immediate.

In backward a value is read when it is needed, or prefetched from the moment that the plan names: when the value of
another op is first fetched, or when backward begins. Its memory is allocated then. A prefetch is a hint: if it
fails, the value is read when it is needed.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Protocol

import torch

from ...records import CodecCost, Plan
from ...records.codec_cost import suitable_codec_costs
from ...records.plan import WHEN_BACKWARD_BEGINS
from ...stores import Store
from ...torch_compat import without_modes
from ..memory.eviction import residency_of
from ..memory.placement import CompressedPlacement, Placement, put_compressed, put_in_store
from ..recording.backward import BackwardMode, BackwardObserver
from ..values.value import Tensor, Value
from ..values.view import flat


class Meter(BackwardObserver, Protocol):
    """Measures live bytes."""

    def count(self, out: Any, extra_bytes: int = 0) -> None:
        """Count tensors. `extra_bytes` were alive in addition while they were made."""


class PlannedTransfers:
    """The transfers of one planned step with its store and its codecs."""

    def __init__(self, plan: Plan, store: Store | None, meter: Meter | None) -> None:
        self.store = store
        self._deadlines = plan.offload_deadlines
        self._compress = frozenset(plan.compress)
        self._codec_costs = plan.codec_costs
        self._suitable: dict[tuple[torch.dtype, int], list[CodecCost]] = {}
        self._meter = meter
        self._due: dict[int, list[weakref.ref[Placement]]] = {}  # by op: writes to wait for before it
        self._last_op = -1
        self._prefetch_at: dict[int, list[int]] = {}  # by event: ops whose values are prefetched then
        for j, event in sorted(plan.prefetches.items(), reverse=True):  # the latest value is needed first
            self._prefetch_at.setdefault(event, []).append(j)
        self._to_prefetch: dict[int, list[weakref.ref[Value]]] = {j: [] for j in plan.prefetches}

    def takes(self, value: Value, tensor: Tensor) -> bool:
        """Return whether the plan offloads or compresses this value. `tensor` is a view of it."""
        origin = value.origin
        # FSDP frees gathered memory while it may still be read. An op may save memory before it writes it.
        if value.recipe is not None or origin is None or origin.facts.regathers or origin.facts.blank:
            return False
        if origin.number in self._compress:
            return bool(self._codecs_for(value, tensor))
        return self.store is not None and origin.number in self._deadlines

    def is_compressed(self, value: Value) -> bool:
        """Return whether the value is compressed now."""
        placement = value.residency.placement if value.residency is not None else None
        return placement is not None and placement.is_compressed

    def put(self, value: Value, tensor: Tensor) -> None:
        """Compress or write a value, unless that is done already."""
        residency = residency_of(value)
        if residency.placement is not None or value.tensor is not None:
            return
        assert value.origin is not None
        number = value.origin.number
        if number in self._compress:
            self._put_compressed(value, tensor)
            return
        assert self.store is not None
        with without_modes():  # the ops of the store are not part of the step
            residency.placement = put_in_store(self.store, flat(tensor), str(value.origin))
        if number in self._to_prefetch:
            self._to_prefetch[number].append(weakref.ref(value))
        due = self._deadlines[number]
        if due <= self._last_op + 1:
            residency.placement.wait_until_written()
        else:
            self._due.setdefault(due, []).append(weakref.ref(residency.placement))

    def _put_compressed(self, value: Value, tensor: Tensor) -> None:
        codecs = self._codecs_for(value, tensor)
        with without_modes():
            placement = put_compressed([cost.codec for cost in codecs], flat(tensor))
        if placement is None:  # no codec applies to this content
            value.hold(tensor, tensor.untyped_storage())
        residency_of(value).placement = placement
        if self._meter is not None:
            parts = placement.encoded.parts if placement is not None else ()
            self._meter.count(parts, _workspace(placement, value, codecs))

    def op_done(self, number: int) -> None:
        """An op has run. Wait for the writes that must be finished before the next one."""
        self._last_op = number
        for due in [due for due in self._due if due <= number + 1]:  # a shorter step leaves out ops
            for ref in self._due.pop(due):
                placement = ref()
                if placement is not None:
                    placement.wait_until_written()

    def fetch(self, value: Value) -> bool:
        """Give a value its tensor if it is offloaded or compressed. Return whether it was."""
        residency = value.residency
        placement = residency.placement if residency is not None else None
        if residency is None or placement is None:
            return False
        if isinstance(placement, CompressedPlacement):
            with without_modes():
                value.own(placement.get())
            residency.placement = None
            if self._meter is not None and value.tensor is not None:
                # `placement` still holds the compressed bytes here, as decompression did.
                self._meter.count(value.tensor, _workspace(placement, value, self._codecs_for(value, value.tensor)))
            return True
        tensor = placement.get()
        value.own(tensor)
        if self._meter is not None:
            self._meter.count(tensor)
        if self._prefetch_at and value.origin is not None:
            self._prefetch(value.origin.number)
        return True

    def backward_begins(self) -> None:
        """The first backward pass through the step begins."""
        if self._prefetch_at:
            self._prefetch(WHEN_BACKWARD_BEGINS)

    def _prefetch(self, event: int) -> None:
        """Start the planned prefetches of an event, for values that are still needed."""
        for op in self._prefetch_at.pop(event, ()):
            for ref in self._to_prefetch.pop(op):
                value = ref()
                residency = value.residency if value is not None and value.tensor is None else None
                placement = residency.placement if residency is not None else None
                if placement is None or not placement.is_usable:
                    continue
                # The mode may have been left for a gradient formula: this memory is measured nevertheless.
                with contextlib.nullcontext() if self._meter is None else BackwardMode(self._meter):
                    placement.prefetch()

    def _codecs_for(self, value: Value, tensor: Tensor) -> list[CodecCost]:
        """Return the planned codecs that suit the dtype and size of a value."""
        key = tensor.dtype, value.nbytes
        found = self._suitable.get(key)
        if found is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            # Codecs check themselves whether the content is binary.
            found = self._suitable[key] = suitable_codec_costs(self._codec_costs, dtype, value.nbytes, binary=True)
        return found


def _workspace(placement: CompressedPlacement | None, value: Value, codecs: list[CodecCost]) -> int:
    """Return the bytes that the codec allocated in addition."""
    used = (cost for cost in codecs if placement is not None and cost.codec == placement.encoded.codec)
    return max((cost.workspace_bytes(value.nbytes) for cost in used), default=0)
