"""The replay context: state shared by the handles of one scope.

It has the settings of forward, a lock, counts, and the source of values that are not in memory. A context holds no
value and no tensor (Rule 4). It may outlive the scope.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from ...records.budget_report import BudgetReport
from ...records.scope_report import ScopeReport
from ...torch_compat import storage_key
from ..ops import numerics
from .saved_tensors import SavedTensors
from .scope_counts import ScopeCounts
from .value import Tensor, Value, describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from .retention import Retention
    from .stage_drops import StageDrops


class Transfers(Protocol):
    """A source of values that are neither in memory nor recomputed: offloaded or compressed ones."""

    def fetch(self, value: Value) -> bool:
        """Give the value its tensor if its content is in a store or compressed. Return whether it was."""


class BudgetForReplay(Transfers, Protocol):
    """The part of a memory budget that replay uses."""

    @property
    def lock(self) -> threading.RLock:
        """The lock of the device's memory."""

    def unpack_begins(self) -> None:
        """Called before a backward node unpacks a value."""

    def unpack_ends(self, value: Value, save: int) -> None:
        """Called when the value is in memory. `save` is the number of the saved tensor."""

    def make_room(self, nbytes: int, what: str, strictly: bool = True) -> None:
        """Evict until `nbytes` more fit."""

    def count(self, tensor: Tensor) -> None:
        """Count a tensor that the engine has allocated."""

    def own(self, value: Value, tensor: Tensor) -> None:
        """Give a recomputed value its tensor."""

    def report(self) -> BudgetReport:
        """Return the counts so far."""


class WriteObserver(Protocol):
    """Listens to writes that end what recipes can read: a profile of the step."""

    def overwritten(self, source: Value) -> None:
        """A source is about to be overwritten."""

    def recipe_deleted(self, value: Value) -> None:
        """A value cannot be recomputed from now on."""


class ReplayContext:
    """State shared by the handles of one scope."""

    def __init__(self, counts: ScopeCounts, memory_budget: BudgetForReplay | None = None) -> None:
        self.counts = counts
        self.saves = SavedTensors()
        self.settings = numerics.current()
        self.memory_budget: BudgetForReplay | None = None
        # Backward may unpack from several threads, one per device.
        self.lock = threading.RLock()
        self.transfers: Transfers | None = None
        self.retention: Retention | None = None
        self.drops: StageDrops | None = None
        self.observer: WriteObserver | None = None
        self.on_replayed: Callable[[Value, Tensor], None] | None = None
        """Called with a value and the tensor that a replay has made for it."""
        self.replaying_thread: int | None = None
        """The thread that is replaying. It holds the lock."""
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        if memory_budget is not None:
            self.use_budget(memory_budget)

    def use_budget(self, memory_budget: BudgetForReplay) -> None:
        """Replay within a memory budget from now on. Scopes evict each other's values, so they share a lock."""
        self.memory_budget = memory_budget
        self.lock = memory_budget.lock

    @property
    def is_replaying(self) -> bool:
        """Whether this thread is replaying. The ops of replays are not recorded."""
        return self.replaying_thread is not None and self.replaying_thread == threading.get_ident()

    def add_root(self, root: torch.nn.Module) -> None:
        """Remember a model, so that errors can name its parameters."""
        self._roots = [ref for ref in self._roots if ref() is not None]
        self._roots.append(weakref.ref(root))

    def name_of(self, value: Value) -> str:
        """Return a name for error messages: a parameter's name, the op that made the value, or its shape."""
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
        """Return the counts of the scope so far."""
        return self.counts.report(self.memory_budget.report() if self.memory_budget is not None else None)
