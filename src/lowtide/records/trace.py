"""The records of one step: `Trace` and its parts.

A trace is immutable and self-contained: everything that a planner needs, nothing that a tensor holds.
`check` says whether it makes sense; `from_json` and `load` always call it, making one by hand does not.
It does not judge plans: that is `lowtide.planning.simulator`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .._errors import ArgumentError

TRACE_VERSION = 10


@dataclass(frozen=True)
class Write:
    """One storage that an in-place op writes.

    `old` is the value that it overwrites, or None where what was there does not matter. `exclusive`: nobody but
    this op wants `old`, so a replay may write over it too (Rule 6).
    """

    old: int | None
    new: int
    exclusive: bool


@dataclass(frozen=True)
class Op:
    """One dispatcher call of forward."""

    name: str
    module: str
    """Dotted path of the module that was running."""
    time_s: float
    inputs: tuple[int, ...]
    """The values that its arguments refer to, distinct, in the order of the arguments."""
    outputs: tuple[int, ...]
    pinned: str | None = None
    """Why it may not be replayed."""
    other_bytes: int = 0
    """Live bytes, while it runs, that are of no value of this trace: parameters, gradients, batch, temporaries."""
    writes: tuple[Write, ...] = ()
    replay_s: float | None = None
    """What its kernel takes when it is made again, where that is another one. None: as long as the first time."""


@dataclass(frozen=True)
class Value:
    """The content of one storage at one version."""

    nbytes: int
    op: int | None
    """Who made it. None: a source from outside, which is always there and whose bytes are in `other_bytes`."""
    storage: int
    """Values of one storage are successive contents of the same memory."""
    user_holds_until: int
    """The last forward op during which somebody other than lowtide holds it; the number of ops: until backward."""
    freed_at_unpack: int | None = None
    """The last ask during which a value that lives until backward is alive; None: it outlives the step."""
    dtype: str = ""
    """As torch calls it ("float32"); empty where it is not known."""
    binary: bool = False
    """Its elements are known to be two different ones at most, as those of a dropout mask are."""


@dataclass(frozen=True)
class Unpack:
    """Backward asks for one saved value."""

    value: int
    node: int
    """Asks of one backward node have one number and follow each other."""
    other_bytes: int = 0
    """The most live bytes, from this ask to the next, that are of no value of this trace."""
    time_s: float = 0.0
    """Backward's own time from this ask to the next."""
    rise_bytes: int = 0
    """Of `other_bytes`: what comes only once the ask has been answered, as what the node makes."""


@dataclass(frozen=True)
class Copied:
    """What would be otherwise at an ask if no gradient were copied that waits as a part of a larger one."""

    unpack: int
    more_bytes: int
    """That many `other_bytes` more; fewer while a copy is there beside what it is a part of."""
    more_rise_bytes: int
    """The same of `rise_bytes`."""


@dataclass(frozen=True)
class Trace:
    """One training step."""

    version: int
    """Of the format: `TRACE_VERSION`."""
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    saved: tuple[int, ...]
    """The values that autograd saves, each once."""
    unpacks: tuple[Unpack, ...]
    step_s: float
    """Time of the whole step when nothing is recomputed."""
    peak_bytes: int
    """The measured peak of that step."""
    device: str = "cpu"
    note: str = ""
    replay_overhead_s: float = 0.0
    """Time to replay an op, beside its kernel."""
    copies: tuple[Copied, ...] = ()
    """By ask, where copies make a difference: this step made them, and `unpacks` are as they are with them."""
    copying_s: float = 0.0
    """What making them takes."""

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the structure, without times and other bytes: equal for steps to which one plan applies."""
        structure = (
            [(op.name, op.module, op.inputs, op.outputs) for op in self.ops],
            [(value.nbytes, value.op, value.storage) for value in self.values],
            self.saved,
            [unpack.value for unpack in self.unpacks],
        )
        return hashlib.sha256(json.dumps(structure, separators=(",", ":")).encode()).hexdigest()[:32]

    def without_copies(self) -> Trace:
        """The same step where no gradient is copied, as plain PyTorch would go through it."""
        if not self.copies:
            return self
        unpacks = list(self.unpacks)
        for copied in self.copies:
            unpack = unpacks[copied.unpack]
            other, rise = unpack.other_bytes + copied.more_bytes, unpack.rise_bytes + copied.more_rise_bytes
            unpacks[copied.unpack] = replace(unpack, other_bytes=max(0, other), rise_bytes=rise)
        return replace(self, unpacks=tuple(unpacks), copies=(), copying_s=0.0)

    def check(self) -> None:
        """Raise `ArgumentError` where the records contradict each other."""
        from .validate import check_trace

        check_trace(self)

    def to_json(self) -> str:
        """Compact JSON; `from_json` gives an equal trace."""
        from .serialize import trace_to_json

        return trace_to_json(self)

    @staticmethod
    def from_json(text: str) -> Trace:
        """The trace that `to_json` wrote, checked; `ArgumentError` for anything else."""
        from .serialize import trace_from_json

        return trace_from_json(text)

    def save(self, path: str | Path) -> None:
        """Write the JSON form to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read what `save` wrote."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"no trace can be read from {str(path)!r}: {error}") from error
        return Trace.from_json(text)
