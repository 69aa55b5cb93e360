"""What a profiled step did so far: its ops, values and asks, when they were, and whose bytes were alive then.

A `Trace` is made of it. Whose bytes are alive is known from the storages themselves: those made by recorded ops (or
replays of them) are the trace's own, all else is "other". How long user code holds a value by itself is known from the
tensor object that the op returned. Somebody else has to look at the step (`tracing`).
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


class _Value:
    __slots__ = ("binary", "dtype", "freed_at_unpack", "nbytes", "op", "storage", "user_holds_until")

    def __init__(self, nbytes: int, op: int | None, storage: int, dtype: str, binary: bool) -> None:
        self.nbytes = nbytes
        self.dtype = dtype
        self.binary = binary
        self.op = op
        self.storage = storage
        self.user_holds_until: int | None = None  # None: alive so far
        self.freed_at_unpack: int | None = None


class _Storage(weakref.ref[torch.UntypedStorage]):
    """A storage that a recorded op made: its bytes are the trace's own until it dies."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class _Others:
    """The most bytes that are not the trace's own, from an ask on."""

    __slots__ = ("first", "most")

    def __init__(self, first: int) -> None:
        self.first = self.most = max(0, first)

    @property
    def rise_bytes(self) -> int:
        """What came after the ask was answered."""
        return self.most - self.first


class StepProfile:
    """What a step did so far."""

    def __init__(self) -> None:
        self.ops: list[records.Op] = []
        self.others: list[int] = []  # by op
        self.values: list[_Value] = []
        self.saved: dict[int, None] = {}
        self.unpacks: list[tuple[int, int]] = []  # value, node
        self.unpack_others: list[_Others] = []
        self.unpack_others_uncopied: list[_Others] = []  # the same, if no gradient were copied
        self.unpack_times: list[tuple[float, float]] = []  # asked, answered
        self.own_bytes = 0
        self._ids: weakref.WeakKeyDictionary[Value, int] = weakref.WeakKeyDictionary()
        self._storages: dict[int, tuple[_Storage, int]] = {}  # key: reference, number
        self._count = 0
        self._lives: dict[int, weakref.ref[Tensor]] = {}  # storage number: the tensor that user code got
        self._latest: dict[int, int] = {}  # storage number: the value it has now
        self._costs = recording_costs()
        self._ended = time.perf_counter()
        self.watching_s: list[float] = []  # by ask: what watching backward has taken
        self.copying_s = 0.0
        self._uncopied_bytes = 0  # that would be alive now, beside what is, if no gradient were copied
        self._resumed_s: float | None = None  # when forward was last left alone
        self._between_s = 0.0  # what forward took between the ops

    # -- time -----------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop the clock of the user's code: an op or a save begins."""
        if self._resumed_s is not None:
            since = time.perf_counter() - self._resumed_s
            if since < _LONGEST_PAUSE_S:  # else it waited for something else
                self._between_s += max(0.0, since - self._costs.dispatch_s)
        self._resumed_s = None

    def resume(self) -> None:
        """Start the clock of the user's code."""
        self._resumed_s = time.perf_counter()

    def watched(self, seconds: float) -> None:
        """An op of backward was watched, which took so long beside it."""
        if self.watching_s:
            self.watching_s[-1] += seconds + self._costs.dispatch_s

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
        # What is made of two different elements, element by element and without other tensors, has two at most.
        binary = facts.tosses_coins or (facts.elementwise and [self.values[v].binary for v in inputs] == [True])
        outputs = []
        for value, tensor in made:
            storage = self._own(tensor)
            outputs.append(self._new(value, number, storage, tensor, binary))
            self._lives[storage] = weakref.ref(tensor, lambda _, s=storage: self._let_go(s))  # type: ignore[misc]
        writes = []
        for write, new in written:
            old_id = self._ids.get(write.replaced) if write.replaced is not None else None
            if old_id is not None:
                storage = self.values[old_id].storage
                self.values[old_id].user_holds_until = number
            else:
                storage = self._own(write.tensor)
            new_id = self._new(new, number, storage, write.tensor, binary)
            outputs.append(new_id)
            if recipe is not None:
                reads = isinstance(write.target, Ref)  # else it does not matter what was there
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
        self.others.append(0)

    def moment(self, live_bytes: int) -> None:
        """So many bytes are alive, of everybody: remember the most that are not the trace's own."""
        other = live_bytes - self.own_bytes
        if self.unpacks:
            with_copies, without = self.unpack_others[-1], self.unpack_others_uncopied[-1]
            with_copies.most = max(with_copies.most, other)
            without.most = max(without.most, other + self._uncopied_bytes)
        elif self.others and other > self.others[-1]:
            self.others[-1] = other

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
        self.unpack_others.append(_Others(other))
        self.unpack_others_uncopied.append(_Others(other + self._uncopied_bytes))
        self.watching_s.append(0.0)
        self.unpack_times.append((since, time.perf_counter()))

    def copies(self, part: Tensor) -> Callable[[float], None]:
        """A gradient is about to be copied: what is returned is called when its wait is over, with what it took.

        Without the copy its memory would not be there; but all that it is a part of would be, until the wait is over.
        """
        unpack, whole_bytes = len(self.unpacks) - 1, part.untyped_storage().nbytes()
        self._uncopied_bytes -= part.nbytes
        more_bytes = -part.nbytes

        def whole_is_gone() -> None:
            nonlocal more_bytes
            self._uncopied_bytes += whole_bytes
            more_bytes += whole_bytes

        gone = weakref.finalize(part.untyped_storage(), whole_is_gone)
        gone.atexit = False

        def is_over(seconds: float) -> None:
            gone.detach()
            self._uncopied_bytes -= more_bytes
            self.copying_s += seconds
            if unpack >= 0:
                self.watching_s[unpack] += seconds

        return is_over

    def ended(self) -> None:
        """The backward pass has ended."""
        self._ended = time.perf_counter()

    # -- the result -----------------------------------------------------------------------------------

    def trace(self, peak_bytes: int, device: str) -> records.Trace:
        """All of it, for a planner."""
        count = len(self.ops)
        values = tuple(
            records.Value(
                v.nbytes,
                v.op,
                v.storage,
                count if v.user_holds_until is None else v.user_holds_until,
                v.freed_at_unpack,
                v.dtype,
                v.binary,
            )
            for v in self.values
        )
        alike = [(op.name, self._sizes(op.inputs), self._sizes(op.outputs)) for op in self.ops]
        times_s = _usual(alike, [op.time_s for op in self.ops])
        replays_s = _usual(alike, [op.replay_s for op in self.ops])
        ops = tuple(
            replace(op, time_s=time_s or 0.0, replay_s=replay_s, other_bytes=other)
            for op, time_s, replay_s, other in zip(self.ops, times_s, replays_s, self.others, strict=True)
        )
        unpacks = self._asks()
        step_s = sum(op.time_s for op in ops) + self._between_s + sum(unpack.time_s for unpack in unpacks)
        asked = {value for value, _ in self.unpacks}
        return records.Trace(
            records.TRACE_VERSION,
            ops,
            values,
            tuple(v for v in self.saved if v in asked),
            unpacks,
            step_s,
            peak_bytes,
            device,
            replay_overhead_s=self._costs.replay_overhead_s,
            copies=self._saved_by_copies(),
            copying_s=self.copying_s,
        )

    def _saved_by_copies(self) -> tuple[records.Copied, ...]:
        found = []
        for k, (with_copies, without) in enumerate(zip(self.unpack_others, self.unpack_others_uncopied, strict=True)):
            more = without.most - with_copies.most, without.rise_bytes - with_copies.rise_bytes
            if any(more):
                found.append(records.Copied(k, *more))
        return tuple(found)

    def _asks(self) -> tuple[records.Unpack, ...]:
        """Each with the time that backward usually takes from one like it to the next."""
        nodes = [node for _, node in self.unpacks]
        begins = [k == 0 or node != nodes[k - 1] for k, node in enumerate(nodes)]
        made_by = [self.values[value].op for value, _ in self.unpacks]
        kinds = [
            (None if op is None else self.ops[op].name, self.values[value].nbytes, others.rise_bytes, first)
            for op, (value, _), others, first in zip(made_by, self.unpacks, self.unpack_others, begins, strict=True)
        ]
        ends = [*(asked for asked, _ in self.unpack_times[1:]), self._ended]
        times_s = _usual(
            list(zip(kinds, [*kinds[1:], None], strict=False)),
            [
                max(0.0, end - answered - watching_s)
                for end, (_, answered), watching_s in zip(ends, self.unpack_times, self.watching_s, strict=False)
            ],
        )
        return tuple(
            records.Unpack(value, number - 1, others.most, time_s or 0.0, others.rise_bytes)
            for (value, _), number, others, time_s in zip(
                self.unpacks, accumulate(begins), self.unpack_others, times_s, strict=True
            )
        )

    def _sizes(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.values[v].nbytes for v in values)

    # -- bookkeeping ----------------------------------------------------------------------------------

    def _id_of(self, value: Value) -> int:
        found = self._ids.get(value)
        if found is None:
            storage = self._count
            self._count += 1
            found = self._new(value, None, storage)
        return found

    def _new(
        self, value: Value, op: int | None, storage: int, tensor: Tensor | None = None, binary: bool = False
    ) -> int:
        """A value, of which `tensor` shows the content if it is all of it."""
        number = len(self.values)
        whole = tensor is not None and covers(tensor, tensor.untyped_storage())
        dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None and whole else ""
        self.values.append(_Value(value.nbytes, op, storage, dtype, binary and whole))
        self._ids[value] = number
        self._latest[storage] = number
        return number

    def _own(self, tensor: Tensor) -> int:
        """Count this storage as the trace's own; its number."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        known = self._storages.get(key)
        if known is not None:
            return known[1]
        row = _Storage(storage, self._gone)
        row.key, row.nbytes = key, storage.nbytes()
        number = self._count
        self._count += 1
        self._storages[key] = row, number
        self.own_bytes += row.nbytes
        return number

    def _gone(self, row: Any) -> None:
        if self._storages.pop(row.key, None) is not None:
            self.own_bytes -= row.nbytes

    def _let_go(self, storage: int) -> None:
        """User code no longer holds the tensor that an op gave it."""
        self._lives.pop(storage, None)
        value = self.values[self._latest[storage]]
        if value.user_holds_until is None:
            value.user_holds_until = max(len(self.ops) - 1, 0) if not self.unpacks else len(self.ops)
            value.freed_at_unpack = len(self.unpacks) - 1 if self.unpacks else None


def _usual(alike: Sequence[Any], times_s: Sequence[float | None]) -> list[float | None]:
    """What the one in the middle took of those that are alike, for each; None where that is known of none."""
    times: dict[Any, list[float]] = {}
    for key, time_s in zip(alike, times_s, strict=True):
        if time_s is not None:
            times.setdefault(key, []).append(time_s)
    usual = {key: median(some) for key, some in times.items()}
    return [usual.get(key) for key in alike]
