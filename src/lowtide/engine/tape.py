"""What the handles of one scope share after the scope has ended: counts, settings and a lock.

A tape holds no value and no tensor (Rule 4): it may outlive the step it describes.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch

from ..reporting.scope_report import Pinned, ScopeReport
from . import numerics
from .torch_private import storage_key
from .values import Origin, Value, describe

if TYPE_CHECKING:
    from .ferrying import Ferry
    from .room import Room
    from .turning import Turning


class Tape:
    """The counts of one scope."""

    def __init__(self, policy: str, room: Room | None = None) -> None:
        self.policy = policy
        self.settings = numerics.current()
        self.room = room  # the budget, where there is one
        # Backward may ask from several threads, one a device; under a budget scopes evict each other's values.
        self.lock = threading.RLock() if room is None else room.lock
        self.ferry: Ferry | None = None  # for a plan that offloads
        self.turning: Turning | None = None  # for a plan that has some ops made more than once
        self.first_handle: weakref.ref[object] | None = None
        self.ops = 0
        self.layers = 0
        self.kept_values = 0
        self.kept_bytes = 0
        self.recomputed_values = 0
        self.recomputed_bytes = 0
        self.offloaded_values = 0
        self.offloaded_bytes = 0
        self.compressed_values = 0
        self.compressed_bytes = 0
        self.outside_values = 0
        self.copied_bytes = 0
        self.replayed_ops = 0
        self.pinned: Counter[tuple[str, str, str]] = Counter()  # (op, module, why)
        self.foreign: Counter[str] = Counter()
        self._roots: list[weakref.ref[torch.nn.Module]] = []

    def has_handles(self) -> bool:
        """Whether autograd still holds anything of this scope."""
        return self.first_handle is not None and self.first_handle() is not None

    def saw_root(self, root: torch.nn.Module) -> None:
        """Remember a model, to be able to call its parameters by name in an error."""
        self._roots = [ref for ref in self._roots if ref() is not None]
        self._roots.append(weakref.ref(root))
        if self.room is not None:
            self.room.ledger.see_module(root)

    def pin(self, origin: Origin, why: str) -> None:
        """Note that what this op made is kept although the policy wanted it recomputed."""
        self.pinned[origin.facts.name, origin.place.path, why] += 1

    def count_saved(self, value: Value) -> None:
        """Count a value that autograd saves for the first time."""
        value.counted = True
        if value.recipe is not None:
            self.recomputed_values += 1
            self.recomputed_bytes += value.nbytes
        elif value.origin is not None:
            self.kept_values += 1
            self.kept_bytes += value.nbytes
        else:
            self.outside_values += 1

    def count_elsewhere(self, value: Value, packed: bool) -> None:
        """Count a value that autograd saves for the first time, and that a plan has wait elsewhere."""
        value.counted = True
        if packed:
            self.compressed_values += 1
            self.compressed_bytes += value.nbytes
        else:
            self.offloaded_values += 1
            self.offloaded_bytes += value.nbytes

    def count_kept_after_all(self, value: Value) -> None:
        """A value that was counted as recomputed turns out to be a layer's input."""
        self.recomputed_values -= 1
        self.recomputed_bytes -= value.nbytes
        self.kept_values += 1
        self.kept_bytes += value.nbytes

    def name_of(self, value: Value) -> str:
        """A value for error messages: a parameter's name, the op that made it, or its shape."""
        tensor = value.tensor
        if tensor is None:
            return f"the value made by {value.origin}"
        if value.origin is not None:
            return f"{describe(tensor)}, made by {value.origin},"
        key = storage_key(tensor.untyped_storage())
        for root in (ref() for ref in self._roots):
            if root is None:
                continue
            for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
                for name, candidate in named:
                    if type(candidate) in (torch.Tensor, torch.nn.Parameter) and (
                        storage_key(candidate.untyped_storage()) == key
                    ):
                        return f"the {kind} {name!r}"
        return f"{describe(tensor)} from outside the scope"

    def report(self) -> ScopeReport:
        """The counts now, as a record of their own."""
        return ScopeReport(
            policy=self.policy,
            ops=self.ops,
            layers=self.layers,
            values_kept=self.kept_values,
            bytes_kept=self.kept_bytes,
            values_recomputed=self.recomputed_values,
            bytes_recomputed=self.recomputed_bytes,
            values_offloaded=self.offloaded_values,
            bytes_offloaded=self.offloaded_bytes,
            values_compressed=self.compressed_values,
            bytes_compressed=self.compressed_bytes,
            values_from_outside=self.outside_values,
            replayed_ops=self.replayed_ops,
            bytes_copied=self.copied_bytes,
            pinned=tuple(Pinned(*key, count) for key, count in self.pinned.items()),
            foreign=dict(self.foreign),
            budget=self.room.report() if self.room is not None else None,
        )
