"""The profile of a running step, from which a `Trace` is made.

It collects one list of events, ops and unpacks, with their times and the live bytes that belong to no recorded op.
Storages made by recorded ops or their replays belong to the trace; all other live bytes are "other". The tensor
objects that ops returned show how long user code holds a value. `ProfileStrategy` reports every event.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from ... import records
from ...torch_compat import graph_task, running_node_number, storage_key
from ..recording.inplace import Written, covers
from ..recording.recorded_op import RecordedOp
from ..values.handles import Handle
from ..values.left_over import LeftOver
from ..values.recipe import Recipe
from ..values.value import Tensor, Value
from ..values.view import Ref
from .profile_events import OpEvent, UnpackEvent, trace_events
from .recording_costs import recording_costs

_LONGEST_PAUSE_S = 0.002
"""Longer gaps between two ops of forward are not counted as time of the step: the process was waiting. Doubled: steps
that load data between ops are predicted slower."""


class _Value:
    """A value of the trace. `held_until` is None while code other than lowtide holds it."""

    __slots__ = ("binary", "dtype", "handles", "held_until", "made_at", "nbytes", "overwritten_at", "shape", "storage")
    shape: tuple[int, ...] | None

    def __init__(self, nbytes: int, made_at: int | None, storage: int, dtype: str, binary: bool) -> None:
        self.nbytes = nbytes
        self.dtype = dtype
        self.binary = binary
        self.made_at = made_at
        self.storage = storage
        self.held_until: int | None = None
        self.handles: dict[int, _HandleSpan] = {}  # by saved tensor
        self.overwritten_at: int | None = None  # only for sources
        self.shape = None


class _HandleSpan:
    """The events after which autograd saved a tensor and freed it. `freed_at` is None while autograd holds it."""

    __slots__ = ("freed_at", "saved_at")

    def __init__(self, saved_at: int) -> None:
        self.saved_at = saved_at
        self.freed_at: int | None = None

    def within(self, n_events: int) -> tuple[int, int]:
        """Return both events, for a step of `n_events`."""
        return self.saved_at, n_events if self.freed_at is None else min(self.freed_at, n_events)


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A storage that a recorded op made. Its bytes belong to the trace until it is freed."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class StepProfile:
    """The events of a step so far."""

    def __init__(self, left_over: LeftOver) -> None:
        self._left_over = left_over
        self.events: list[OpEvent | UnpackEvent] = []
        self.values: list[_Value] = []
        self.saved: dict[int, None] = {}
        self.n_ops = 0
        self.unpacks: list[UnpackEvent] = []
        self.passes: list[tuple[int, int]] = []
        """By backward pass: the ops and the saved tensors before it."""
        self.own_bytes = 0
        self._ids: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self._storages: dict[int, tuple[_Storage, int]] = {}  # key: reference, number
        self._n_storages = 0
        self._user_tensors: dict[int, dict[int, weakref.ref[Tensor]]] = {}  # by storage number: what user code got
        self._handles: list[weakref.ref[object]] = []
        self._value_of: dict[int, int] = {}  # by saved tensor
        self._lost_at: dict[int, int] = {}  # by op, as an event: the event by which its recipe has been deleted
        self._latest: dict[int, int] = {}  # by storage number: its present value
        self._costs = recording_costs()
        self.copying_s = 0.0
        self._uncopied_bytes = 0  # bytes that would be alive in addition, if no gradient were copied
        self._resumed_s: float | None = None  # when user code last continued
        self._between_ops_s = 0.0
        self._pass_numbers: dict[int, int] = {}  # by graph task
        self._end = 0, 0  # the numbers of events and values at the end of the last backward pass

    # -- time -----------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop the clock of the user's code, or of a backward node: an op or a save begins."""
        now = time.perf_counter()
        self._end_unpack(now)
        if self._resumed_s is not None:
            since = now - self._resumed_s
            if since < _LONGEST_PAUSE_S:
                self._between_ops_s += max(0.0, since - self._costs.dispatch_s)
        self._resumed_s = None

    def resume(self) -> None:
        """Start the clock of the user's code."""
        self._resumed_s = time.perf_counter()

    def watched(self, seconds: float) -> None:
        """Subtract the time that the memory budget spent on an op of backward."""
        if self.unpacks:
            self.unpacks[-1].budget_s += seconds + self._costs.dispatch_s

    def _end_unpack(self, now: float) -> None:
        """The work that followed the last unpack has ended."""
        if self.unpacks and self.unpacks[-1].next_s is None:
            self.unpacks[-1].next_s = now

    # -- ops ------------------------------------------------------------------------------------------

    def op(
        self,
        op: RecordedOp,
        recipe: Recipe | None,
        made: list[tuple[Value, Tensor]],
        written: list[tuple[Written, Value]],
        pinned: str | None,
        cost_us: float,
        replay_us: float | None,
        workspace_bytes: int,
    ) -> None:
        """Add an op that has run."""
        facts = op.facts
        number = len(self.events)
        inputs: dict[int, None] = {}
        if recipe is not None:
            for ref in recipe.refs:
                inputs[self._used(ref.value)] = None
        # An elementwise function of one tensor with two distinct elements has at most two itself.
        binary = facts.draws_binary or (facts.elementwise and [self.values[v].binary for v in inputs] == [True])
        outputs = []
        for value, tensor in made:
            storage = self._own(tensor)
            outputs.append(self._new(value, number, storage, tensor, binary))
            self._user_tensors.setdefault(storage, {})
            self._held_by_user(storage, tensor)
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
        record = records.Op(
            name=facts.name,
            module=op.location.path,
            time_s=cost_us * 1e-6,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            pinned=pinned,
            writes=tuple(writes),
            replay_s=replay_s,
            backward=self._pass_number(),
            workspace_bytes=workspace_bytes,
        )
        self.events.append(OpEvent(record))
        self.n_ops += 1

    def returned(self, out: Any) -> None:
        """An op has returned `out` to user code. It may share the memory of a value."""
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(item, torch.Tensor) or not self._storages:
                continue
            try:
                known = self._storages.get(storage_key(item.untyped_storage()))
            except (NotImplementedError, RuntimeError):  # foreign
                continue
            # A value that user code has freed does not become user code's again: the engine made this tensor.
            if known is not None and known[1] in self._user_tensors:
                self._held_by_user(known[1], item)

    def _other_bytes(self, live_bytes: int) -> int:
        """Return the live bytes of no value of the trace, with those that a planned step before would have left."""
        return live_bytes - self.own_bytes + self._left_over.evicted_bytes()

    def moment(self, live_bytes: int) -> None:
        """Record the live bytes at this moment of the current event."""
        if self.events:
            other = self._other_bytes(live_bytes)
            self.events[-1].moment(other, other + self._uncopied_bytes)

    def formula_begins(self, live_bytes: int) -> Callable[[int], None]:
        """A gradient formula begins whose ops are not observed. Call the result with the bytes that it needed."""
        if not self.events:
            return lambda nbytes: None
        event, other, uncopied_bytes = self.events[-1], self._other_bytes(live_bytes), self._uncopied_bytes

        def ended(nbytes: int) -> None:
            event.moment(other + nbytes, other + nbytes + uncopied_bytes)

        return ended

    def saved_value(self, value: Value) -> None:
        """Autograd saves a value."""
        self.saved[self._used(value)] = None

    def handle_made(self, value: Value, handle: object, save: int) -> None:
        """Autograd holds `handle` for a value. `save` is the number of the saved tensor."""
        span = _HandleSpan(len(self.events) - 1)
        number = self._value_of[save] = self._id_of(value)
        self.values[number].handles[save] = span

        def freed(_: Any) -> None:
            span.freed_at = len(self.events) - 1

        self._handles.append(weakref.ref(handle, freed))

    def handles_moved(self, handles: Iterable[Handle], value: Value) -> None:
        """The latest op has made `value`. Handles on an older value of its storage now refer to it."""
        newer = self._used(value)
        for handle in handles:
            older, self._value_of[handle.save] = self._value_of[handle.save], newer
            span = self.values[older].handles.pop(handle.save)
            span.saved_at = len(self.events) - 1
            self.values[newer].handles[handle.save] = span
            if not self.values[older].handles:
                self.saved.pop(older)
        self.saved[newer] = None

    def held(self, tensor: Tensor) -> None:
        """Count recomputed, fetched or compressed memory as the trace's own."""
        self._own(tensor)

    def overwritten(self, source: Value) -> None:
        """A source is about to be overwritten. Ops that read it cannot be replayed from now on."""
        found = self._ids.get(source)
        if found is not None and self.values[found].overwritten_at is None:
            self.values[found].overwritten_at = len(self.events)

    def recipe_deleted(self, value: Value) -> None:
        """A value can no longer be recomputed, although user code may still use it."""
        found = self._ids.get(value)
        made_at = None if found is None else self.values[found].made_at
        if made_at is not None:
            self._lost_at.setdefault(made_at, len(self.events))

    # -- backward -------------------------------------------------------------------------------------

    def backward_begins(self, n_saves: int) -> None:
        """A backward pass begins. Note which sources were written unseen."""
        self._resumed_s = None
        self.passes.append((self.n_ops, n_saves))
        for value in list(self._ids):
            if value.origin is None and value.changed() is not None:
                self.overwritten(value)

    def backward_ended(self) -> None:
        """A backward pass has ended. If it is the last one, the step ends here."""
        self._end_unpack(time.perf_counter())
        self._end = len(self.events), len(self.values)

    def unpacked(self, value: Value, save: int, since: float, live_bytes: int) -> None:
        """Backward has unpacked a value. The unpack began at `since`."""
        self._end_unpack(since)
        other = self._other_bytes(live_bytes)
        number, backward = self._id_of(value), self._pass_number() or 0
        event = UnpackEvent(number, running_node_number(), save, backward, other, other + self._uncopied_bytes)
        event.ended_s = time.perf_counter()
        self.events.append(event)
        self.unpacks.append(event)

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
                self.unpacks[unpack].budget_s += seconds

        return copy_used

    def _pass_number(self) -> int | None:
        """Return the number of the running backward pass, or None outside backward."""
        task = graph_task()
        return None if task == -1 else self._pass_numbers.setdefault(task, len(self._pass_numbers))

    # -- the result -----------------------------------------------------------------------------------

    def trace(self, peak_bytes: int, device: str) -> records.Trace:
        """Return the trace of the step."""
        n_events, n_values = self._end
        # Recomputed memory has numbers too, and how much is recomputed depends on the sizes of the step.
        storages: dict[int, int] = {}
        values = tuple(
            records.Value(
                v.nbytes,
                v.made_at,
                storages.setdefault(v.storage, len(storages)),
                n_events if v.held_until is None else min(v.held_until, n_events),
                v.dtype,
                v.binary,
                tuple(span.within(n_events) for span in v.handles.values() if span.saved_at < n_events),
                shape=v.shape,
            )
            for v in self.values[:n_values]
        )
        for made_at, lost_at in self._lost_at.items():
            if lost_at < n_events:
                self._pin(made_at, "it cannot be recomputed when it is needed")
        events = trace_events(self.events[:n_events], values, self._reads_until)
        return records.Trace(
            records.TRACE_VERSION,
            events,
            values,
            tuple(v for v in self.saved if v < n_values),
            self._between_ops_s + sum(event.time_s for event in events),
            peak_bytes,
            device,
            replay_overhead_s=self._costs.replay_overhead_s,
            copies=self._copy_effects(),
            copying_s=self.copying_s,
        )

    def keep_left_over(self, trace: records.Trace, *, only_of_sources: bool = False) -> records.Trace:
        """Return `trace` with the values kept that autograd still holds. The next step is about to begin.

        They stay in memory for an unknown part of later steps, as they do in plain PyTorch. If `only_of_sources`, only
        those are kept that are made from sources: recomputing these would need copies of all parameters that an
        optimizer has changed since.
        """
        n_events, _ = self._end
        left = {v.made_at for v in self.values if any(span.freed_at is None for span in v.handles.values())}
        events = list(trace.events)
        for made_at in left:
            if made_at is not None and made_at < n_events:
                op = events[made_at]
                assert isinstance(op, records.Op)
                if only_of_sources and all(trace.values[v].made_at is not None for v in op.inputs):
                    continue
                events[made_at] = replace(op, pinned=op.pinned or "autograd holds its values when the next step begins")
        return replace(trace, events=tuple(events))

    def _pin(self, made_at: int, why: str) -> None:
        maker = self.events[made_at]
        if isinstance(maker, OpEvent) and maker.record.pinned is None:
            maker.record = replace(maker.record, pinned=why)

    def _reads_until(self, inputs: Iterable[int]) -> int | None:
        """Return the event that overwrites one of these inputs, if they are sources."""
        found = [at for v in inputs if (at := self.values[v].overwritten_at) is not None]
        return min(found, default=None)

    def _copy_effects(self) -> tuple[records.CopyEffect, ...]:
        effects = []
        for k, unpack in enumerate(self.unpacks):
            more = (
                unpack.uncopied.highest - unpack.other.highest,
                unpack.uncopied.rise_bytes - unpack.other.rise_bytes,
            )
            if any(more):
                effects.append(records.CopyEffect(k, *more))
        return tuple(effects)

    # -- bookkeeping ----------------------------------------------------------------------------------

    def _used(self, value: Value) -> int:
        """Return the index of a value that a handle or a recipe is about to use."""
        if value.origin is not None and value.recipe is None:
            self.recipe_deleted(value)  # its recipe was deleted because nothing seemed to need it
        return self._id_of(value)

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
        if tensor is not None and whole:
            self.values[number].shape = tuple(tensor.shape)
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

    def _held_by_user(self, storage: int, tensor: Tensor) -> None:
        """User code holds `tensor`, on this storage."""
        held = self._user_tensors[storage]

        def freed(ref: weakref.ref[Tensor]) -> None:
            held.pop(id(ref), None)
            if not held and self._user_tensors.pop(storage, None) is not None:
                value = self.values[self._latest[storage]]
                if value.held_until is None:
                    value.held_until = max(len(self.events) - 1, 0)

        ref = weakref.ref(tensor, freed)
        held[id(ref)] = ref  # references to tensors cannot be compared
