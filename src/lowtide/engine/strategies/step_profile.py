"""The profile of a running step, from which a `Trace` is made.

It collects ops, values and unpacks, their times, and the live bytes that belong to no recorded op. Storages made by
recorded ops or their replays belong to the trace; all other live bytes are "other". The tensor object that an op
returned shows how long user code holds a value. `ProfileStrategy` reports every event.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import median
from typing import Any

import torch

from ... import records
from ...torch_compat import running_node_number, storage_key
from ..recording.inplace import Written, covers
from ..recording.recorded_op import RecordedOp
from ..values.recipe import Recipe
from ..values.value import Tensor, Value
from ..values.view import Ref
from .recording_costs import recording_costs

_LONGEST_PAUSE_S = 0.002
"""Longer gaps between two ops of forward are not counted as time of the step: the process was waiting. Doubled: steps
that load data between ops are predicted slower."""


class _Value:
    """A value of the trace. `held_until` is None while code other than lowtide holds it."""

    __slots__ = ("binary", "dtype", "held_until", "made_at", "nbytes", "storage")

    def __init__(self, nbytes: int, made_at: int | None, storage: int, dtype: str, binary: bool) -> None:
        self.nbytes = nbytes
        self.dtype = dtype
        self.binary = binary
        self.made_at = made_at
        self.storage = storage
        self.held_until: int | None = None


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A storage that a recorded op made. Its bytes belong to the trace until it is freed."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class _OtherBytes:
    """Live bytes that do not belong to the trace, from one unpack to the next."""

    __slots__ = ("at_unpack", "highest")

    def __init__(self, at_unpack: int) -> None:
        self.at_unpack = self.highest = max(0, at_unpack)

    @property
    def rise_bytes(self) -> int:
        """Bytes allocated after the unpack."""
        return self.highest - self.at_unpack


class StepProfile:
    """The events of a step so far."""

    def __init__(self) -> None:
        self.ops: list[records.Op] = []
        self.op_other_bytes: list[int] = []
        self.values: list[_Value] = []
        self.saved: dict[int, None] = {}
        self.unpacks: list[tuple[int, int]] = []  # value, node
        self.unpack_other_bytes: list[_OtherBytes] = []
        self.uncopied_other_bytes: list[_OtherBytes] = []  # the same, if no gradient were copied
        self.unpack_times: list[tuple[float, float]] = []  # start and end of each unpack
        self.own_bytes = 0
        self._ids: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self._storages: dict[int, tuple[_Storage, int]] = {}  # key: reference, number
        self._n_storages = 0
        self._user_tensors: dict[int, weakref.ref[Tensor]] = {}  # by storage number: the result that user code got
        self._latest: dict[int, int] = {}  # by storage number: its present value
        self._costs = recording_costs()
        self._ended = time.perf_counter()
        self.budget_s: list[float] = []  # by unpack: time that the memory budget took until the next unpack
        self.copying_s = 0.0
        self._uncopied_bytes = 0  # bytes that would be alive in addition, if no gradient were copied
        self._resumed_s: float | None = None  # when user code last continued
        self._between_ops_s = 0.0

    # -- time -----------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop the clock of the user's code: an op or a save begins."""
        if self._resumed_s is not None:
            since = time.perf_counter() - self._resumed_s
            if since < _LONGEST_PAUSE_S:
                self._between_ops_s += max(0.0, since - self._costs.dispatch_s)
        self._resumed_s = None

    def resume(self) -> None:
        """Start the clock of the user's code."""
        self._resumed_s = time.perf_counter()

    def watched(self, seconds: float) -> None:
        """Subtract the time that the memory budget spent on an op of backward."""
        if self.budget_s:
            self.budget_s[-1] += seconds + self._costs.dispatch_s

    # -- forward --------------------------------------------------------------------------------------

    def op(
        self,
        op: RecordedOp,
        recipe: Recipe | None,
        made: list[tuple[Value, Tensor]],
        written: list[tuple[Written, Value]],
        pinned: str | None,
        cost_us: float,
        replay_us: float | None,
    ) -> None:
        """Add an op that has run."""
        facts = op.facts
        number = len(self.ops)
        inputs: dict[int, None] = {}
        if recipe is not None:
            for ref in recipe.refs:
                inputs[self._id_of(ref.value)] = None
        # An elementwise function of one tensor with two distinct elements has at most two itself.
        binary = facts.draws_binary or (facts.elementwise and [self.values[v].binary for v in inputs] == [True])
        outputs = []
        for value, tensor in made:
            storage = self._own(tensor)
            outputs.append(self._new(value, number, storage, tensor, binary))
            self._user_tensors[storage] = weakref.ref(tensor, lambda _, s=storage: self._freed_by_user(s))  # type: ignore[misc]
        writes = []
        for write, new in written:
            old_id = self._ids.get(write.replaced) if write.replaced is not None else None
            if old_id is not None:
                storage = self.values[old_id].storage
                self.values[old_id].held_until = number
            else:
                storage = self._own(write.tensor)
            new_id = self._new(new, number, storage, write.tensor, binary)
            outputs.append(new_id)
            if recipe is not None:
                reads = isinstance(write.target, Ref)  # otherwise the old content does not matter
                writes.append(records.Write(old_id if reads else None, new_id, write.exclusive))
        replay_s = None if replay_us is None else replay_us * 1e-6
        self.ops.append(
            records.Op(
                name=facts.name,
                module=op.location.path,
                time_s=cost_us * 1e-6,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                pinned=pinned,
                writes=tuple(writes),
                replay_s=replay_s,
            )
        )
        self.op_other_bytes.append(0)

    def moment(self, live_bytes: int) -> None:
        """Record the live bytes at this moment of the current event."""
        other = live_bytes - self.own_bytes
        if self.unpacks:
            copied, uncopied = self.unpack_other_bytes[-1], self.uncopied_other_bytes[-1]
            copied.highest = max(copied.highest, other)
            uncopied.highest = max(uncopied.highest, other + self._uncopied_bytes)
        elif self.op_other_bytes and other > self.op_other_bytes[-1]:
            self.op_other_bytes[-1] = other

    def saved_value(self, value: Value) -> None:
        """Autograd saves a value."""
        self.saved[self._id_of(value)] = None

    def recomputed(self, tensor: Tensor) -> None:
        """Count recomputed or fetched memory as the trace's own."""
        self._own(tensor)

    # -- backward -------------------------------------------------------------------------------------

    def unpacked(self, value: Value, since: float, live_bytes: int) -> None:
        """Backward has unpacked a value."""
        self.unpacks.append((self._id_of(value), running_node_number()))
        other = live_bytes - self.own_bytes
        self.unpack_other_bytes.append(_OtherBytes(other))
        self.uncopied_other_bytes.append(_OtherBytes(other + self._uncopied_bytes))
        self.budget_s.append(0.0)
        self.unpack_times.append((since, time.perf_counter()))

    def copies(self, part: Tensor) -> Callable[[float], None]:
        """Record that a gradient is about to be copied. Call the result when the copy is no longer needed.

        Without the copy, the copy's own memory would not exist, but the larger gradient would live until then.
        """
        unpack, whole_bytes = len(self.unpacks) - 1, part.untyped_storage().nbytes()
        self._uncopied_bytes -= part.nbytes
        more_bytes = -part.nbytes

        def whole_freed() -> None:
            nonlocal more_bytes
            self._uncopied_bytes += whole_bytes
            more_bytes += whole_bytes

        whole = weakref.finalize(part.untyped_storage(), whole_freed)
        whole.atexit = False

        def copy_used(seconds: float) -> None:
            whole.detach()
            self._uncopied_bytes -= more_bytes
            self.copying_s += seconds
            if unpack >= 0:
                self.budget_s[unpack] += seconds

        return copy_used

    def ended(self) -> None:
        """The backward pass has ended."""
        self._ended = time.perf_counter()

    # -- the result -----------------------------------------------------------------------------------

    def trace(self, peak_bytes: int, device: str) -> records.Trace:
        """Return the trace of the step."""
        n_events = len(self.ops) + len(self.unpacks)
        values = tuple(
            records.Value(
                v.nbytes,
                v.made_at,
                v.storage,
                n_events if v.held_until is None else v.held_until,
                v.dtype,
                v.binary,
            )
            for v in self.values
        )
        signatures = [(op.name, self._sizes(op.inputs), self._sizes(op.outputs)) for op in self.ops]
        times_s = _medians(signatures, [op.time_s for op in self.ops])
        replays_s = _medians(signatures, [op.replay_s for op in self.ops])
        ops = tuple(
            replace(op, time_s=time_s or 0.0, replay_s=replay_s, other_bytes=other)
            for op, time_s, replay_s, other in zip(self.ops, times_s, replays_s, self.op_other_bytes, strict=True)
        )
        unpacks = self._unpack_events()
        step_s = sum(op.time_s for op in ops) + self._between_ops_s + sum(unpack.time_s for unpack in unpacks)
        unpacked = {value for value, _ in self.unpacks}
        return records.Trace(
            records.TRACE_VERSION,
            (*ops, *unpacks),
            values,
            tuple(v for v in self.saved if v in unpacked),
            step_s,
            peak_bytes,
            device,
            replay_overhead_s=self._costs.replay_overhead_s,
            copies=self._copy_effects(),
            copying_s=self.copying_s,
        )

    def _copy_effects(self) -> tuple[records.CopyEffect, ...]:
        effects = []
        for k, (copied, uncopied) in enumerate(zip(self.unpack_other_bytes, self.uncopied_other_bytes, strict=True)):
            more = uncopied.highest - copied.highest, uncopied.rise_bytes - copied.rise_bytes
            if any(more):
                effects.append(records.CopyEffect(k, *more))
        return tuple(effects)

    def _unpack_events(self) -> tuple[records.Unpack, ...]:
        """Return the unpacks. Each has the median time of unpacks with the same signature and the same successor."""
        nodes = [node for _, node in self.unpacks]
        is_first_of_node = [k == 0 or node != nodes[k - 1] for k, node in enumerate(nodes)]
        signatures = []
        for (value, _), other, is_first in zip(self.unpacks, self.unpack_other_bytes, is_first_of_node, strict=True):
            made_at = self.values[value].made_at
            name = None if made_at is None else self.ops[made_at].name
            signatures.append((name, self.values[value].nbytes, other.rise_bytes, is_first))
        next_starts = [*(start for start, _ in self.unpack_times[1:]), self._ended]
        times_s = _medians(
            list(zip(signatures, [*signatures[1:], None], strict=False)),
            [
                max(0.0, next_start - end - budget_s)
                for next_start, (_, end), budget_s in zip(next_starts, self.unpack_times, self.budget_s, strict=False)
            ],
        )
        return tuple(
            records.Unpack(value, number - 1, other.highest, time_s or 0.0, other.rise_bytes)
            for (value, _), number, other, time_s in zip(
                self.unpacks, accumulate(is_first_of_node), self.unpack_other_bytes, times_s, strict=True
            )
        )

    def _sizes(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.values[v].nbytes for v in values)

    # -- bookkeeping ----------------------------------------------------------------------------------

    def _id_of(self, value: Value) -> int:
        found = self._ids.get(value)
        if found is None:
            storage = self._n_storages
            self._n_storages += 1
            found = self._new(value, None, storage)
        return found

    def _new(
        self, value: Value, made_at: int | None, storage: int, tensor: Tensor | None = None, binary: bool = False
    ) -> int:
        """Add a value and return its index. Its dtype is known if `tensor` covers the storage."""
        number = len(self.values)
        whole = tensor is not None and covers(tensor, tensor.untyped_storage())
        dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None and whole else ""
        self.values.append(_Value(value.nbytes, made_at, storage, dtype, binary and whole))
        self._ids[value] = number
        self._latest[storage] = number
        return number

    def _own(self, tensor: Tensor) -> int:
        """Count a storage as part of the trace. Return its number."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        known = self._storages.get(key)
        if known is not None:
            return known[1]
        row = _Storage(storage, self._storage_freed)
        row.key, row.nbytes = key, storage.nbytes()
        number = self._n_storages
        self._n_storages += 1
        self._storages[key] = row, number
        self.own_bytes += row.nbytes
        return number

    def _storage_freed(self, row: Any) -> None:
        if self._storages.pop(row.key, None) is not None:
            self.own_bytes -= row.nbytes

    def _freed_by_user(self, storage: int) -> None:
        """User code no longer holds the tensor that an op returned."""
        self._user_tensors.pop(storage, None)
        value = self.values[self._latest[storage]]
        if value.held_until is None:
            value.held_until = max(len(self.ops) + len(self.unpacks) - 1, 0)


def _medians(signatures: Sequence[Any], times_s: Sequence[float | None]) -> list[float | None]:
    """Return for each item the median time of the items with its signature, or None if none has a time."""
    times: dict[Any, list[float]] = {}
    for signature, time_s in zip(signatures, times_s, strict=True):
        if time_s is not None:
            times.setdefault(signature, []).append(time_s)
    found = {signature: median(some) for signature, some in times.items()}
    return [found.get(signature) for signature in signatures]
