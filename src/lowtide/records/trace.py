"""The record of one training step: a `Trace`, and its parts.

A trace is one list of events, in the order in which they happened: an op ran, or backward unpacked a value. It is
immutable and contains no tensors. Values, ops and unpacks refer to each other by index.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .._errors import ArgumentError

TRACE_VERSION = 11


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


@dataclass(frozen=True)
class CopyEffect:
    """How an unpack would differ without gradient copies (see `engine.recording.gradient_copies`)."""

    unpack: int
    """Index among the unpacks."""
    more_bytes: int
    """Added to `other_bytes`; negative while a copy and its original are both alive."""
    more_rise_bytes: int
    """Added to `rise_bytes`."""


@dataclass(frozen=True)
class Trace:
    """One training step."""

    version: int
    """`TRACE_VERSION` of the format."""
    events: tuple[Op | Unpack, ...]
    """In the order in which they happened. Planning requires all ops before the first unpack."""
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
    def fingerprint(self) -> str:
        """Hash of the structure, without times and other bytes. A plan applies to steps with its fingerprint."""
        structure = (
            [(op.name, op.module, op.inputs, op.outputs) for op in self.ops],
            [(value.nbytes, value.made_at, value.storage) for value in self.values],
            self.saved,
            [unpack.value for unpack in self.unpacks],
        )
        return hashlib.sha256(json.dumps(structure, separators=(",", ":")).encode()).hexdigest()[:32]

    def without_copies(self) -> Trace:
        """Return the step as plain PyTorch runs it, without gradient copies."""
        if not self.copies:
            return self
        unpacks = list(self.unpacks)
        for effect in self.copies:
            unpack = unpacks[effect.unpack]
            other, rise = unpack.other_bytes + effect.more_bytes, unpack.rise_bytes + effect.more_rise_bytes
            unpacks[effect.unpack] = replace(unpack, other_bytes=max(0, other), rise_bytes=rise)
        return replace(self, events=(*self.ops, *unpacks), copies=(), copying_s=0.0)

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
