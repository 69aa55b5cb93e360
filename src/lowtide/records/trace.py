"""The record of one training step: a `Trace`, and its parts.

A trace is one list of events, in the order in which they happened: an op ran, or backward unpacked a value. A step may
contain several forward and several backward passes. A trace is immutable and contains no tensors. Events and values
are referred to by index.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .._errors import ArgumentError

TRACE_VERSION = 13


@dataclass(frozen=True)
class Write:
    """One storage that an in-place op writes."""

    old: int | None
    """The value that is overwritten. None: its content does not matter."""
    new: int
    exclusive: bool
    """No other recipe or handle uses `old`, so a replay may overwrite it too (Rule 6)."""


@dataclass(frozen=True)
class Op:
    """Event: one dispatcher call."""

    name: str
    module: str
    """Dotted path of the running module."""
    time_s: float
    inputs: tuple[int, ...]
    """Distinct values that its arguments refer to, in the order of the arguments."""
    outputs: tuple[int, ...]
    pinned: str | None = None
    """Why the op must not be replayed."""
    other_bytes: int = 0
    """Live bytes of no value of this trace while the op runs: parameters, gradients, batch, temporaries."""
    writes: tuple[Write, ...] = ()
    replay_s: float | None = None
    """Kernel time of a replay, if a replay runs another kernel. None: `time_s`."""
    backward: int | None = None
    """Number of the backward pass in which it ran, from 0. None: outside backward."""
    workspace_bytes: int = 0
    """Bytes that its kernel allocates and frees. They are part of `other_bytes`, so they count for replays only."""
    reads_until: int | None = None
    """The event that overwrites memory that it reads and that is no value of this trace. None: never overwritten."""


@dataclass(frozen=True)
class Unpack:
    """Event: a backward node unpacks a saved value."""

    value: int
    node: int
    """Number of the backward node. The unpacks of one node follow each other."""
    other_bytes: int = 0
    """Highest live bytes of no value of this trace, from this event to the next."""
    time_s: float = 0.0
    """Time of backward from this event to the next."""
    rise_bytes: int = 0
    """The part of `other_bytes` that is allocated after the unpack, such as the results of the node."""
    backward: int = 0
    """Number of the backward pass, from 0."""
    save: int = -1
    """Index of the saved tensor among all tensors that autograd saved in the step, in order. -1: unknown."""


@dataclass(frozen=True)
class Value:
    """The content of one storage at one version."""

    nbytes: int
    made_at: int | None
    """The event that made it. None: a source, always alive, with its bytes in `other_bytes`."""
    storage: int
    """Values with the same number are successive contents of one storage."""
    held_until: int
    """The last event at which code other than lowtide holds it. The number of events: it outlives the step."""
    dtype: str = ""
    """Such as "float32". Empty if unknown."""
    binary: bool = False
    """It has at most two distinct elements, as a dropout mask does."""
    handles: tuple[tuple[int, int], ...] = ()
    """By tensor that autograd saved of it: the events after which autograd saved it and freed it. -1: saved before the
    first event. The number of events: it outlives the step. Empty: unknown, and freed with the last node that
    unpacks it."""
    shape: tuple[int, ...] | None = None
    """Of the tensor that the op returned. None: unknown, or the tensor does not cover the storage."""


@dataclass(frozen=True)
class CopyEffect:
    """How an unpack would differ without gradient copies (see `engine.recording.gradient_copies`)."""

    unpack: int
    """Index among the unpacks."""
    more_bytes: int
    """Added to `other_bytes`; negative while a copy and its original are both alive."""
    more_rise_bytes: int
    """Added to `rise_bytes`."""


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Trace:
    """One training step."""

    version: int
    """`TRACE_VERSION` of the format."""
    events: tuple[Op | Unpack, ...]
    """In the order in which they happened."""
    values: tuple[Value, ...]
    saved: tuple[int, ...]
    """The values that autograd saves, each once."""
    step_s: float
    """Time of the step if nothing is recomputed."""
    peak_bytes: int
    """Measured peak of the profiled step."""
    device: str = "cpu"
    note: str = ""
    replay_overhead_s: float = 0.0
    """Time to record an op and to replay it, without its kernel."""
    copies: tuple[CopyEffect, ...] = ()
    """Effects of the gradient copies that the profiled step made. `events` include the copies."""
    copying_s: float = 0.0
    """Time of the gradient copies."""

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops, in order."""
        return tuple(event for event in self.events if isinstance(event, Op))

    @cached_property
    def unpacks(self) -> tuple[Unpack, ...]:
        """The unpacks, in order."""
        return tuple(event for event in self.events if isinstance(event, Unpack))

    @cached_property
    def op_events(self) -> tuple[int, ...]:
        """By op: the event."""
        return tuple(index for index, event in enumerate(self.events) if isinstance(event, Op))

    @cached_property
    def unpack_events(self) -> tuple[int, ...]:
        """By unpack: the event."""
        return tuple(index for index, event in enumerate(self.events) if isinstance(event, Unpack))

    @cached_property
    def is_single_pass(self) -> bool:
        """Whether the step is one forward pass, and then one backward pass that frees what it unpacks."""
        if self.events[: len(self.ops)] != self.ops or len({unpack.backward for unpack in self.unpacks}) > 1:
            return False
        if any(op.backward is not None or (op.reads_until is not None and op.pinned is None) for op in self.ops):
            return False
        freed_by = self._ends_of_last_nodes()
        return all(
            saved < len(self.ops) and freed <= freed_by.get(v, value.held_until)
            for v, value in enumerate(self.values)
            if value.made_at is not None
            for saved, freed in value.handles
        )

    def _ends_of_last_nodes(self) -> dict[int, int]:
        """Return, by unpacked value, the last unpack of the last node that unpacks it, as an event."""
        node_end = {
            (unpack.backward, unpack.node): t for t, unpack in zip(self.unpack_events, self.unpacks, strict=True)
        }
        return {unpack.value: node_end[unpack.backward, unpack.node] for unpack in self.unpacks}

    @cached_property
    def structure(self) -> str:
        """Hash of the ops, values and unpacks, without sizes and times. Steps of one variant have equal structures."""
        return _hash(
            [(op.name, op.module, op.inputs, op.outputs, op.backward) for op in self.ops],
            [(value.made_at, value.storage, [saved for saved, _ in value.handles]) for value in self.values],
            self.saved,
            [(unpack.value, unpack.backward, unpack.save) for unpack in self.unpacks],
            self.unpack_events,
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the structure and the sizes of values. A plan is made for steps with its fingerprint."""
        return _hash(self.structure, [value.nbytes for value in self.values])

    def without_copies(self) -> Trace:
        """Return the step as plain PyTorch runs it, without gradient copies."""
        if not self.copies:
            return self
        events = list(self.events)
        for effect in self.copies:
            unpack = self.unpacks[effect.unpack]
            other, rise = unpack.other_bytes + effect.more_bytes, unpack.rise_bytes + effect.more_rise_bytes
            without = replace(unpack, other_bytes=max(0, other), rise_bytes=rise)
            events[self.unpack_events[effect.unpack]] = without
        return replace(self, events=tuple(events), copies=(), copying_s=0.0)

    def check(self) -> None:
        """Raise `ArgumentError` if records contradict each other. `from_json` and `load` always check."""
        from .validate import check_trace

        check_trace(self)

    def to_json(self) -> str:
        """Return compact JSON. `from_json` returns an equal trace."""
        from .serialize import trace_to_json

        return trace_to_json(self)

    @staticmethod
    def from_json(text: str) -> Trace:
        """Return the trace in `text`. Raises `ArgumentError` for anything else."""
        from .serialize import trace_from_json

        return trace_from_json(text)

    def save(self, path: str | Path) -> None:
        """Write the trace to a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a file that `save` wrote. Raises `ArgumentError` for anything else."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"cannot read a trace from {str(path)!r}: {error}") from error
        return Trace.from_json(text)
