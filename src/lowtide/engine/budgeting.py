"""`budget`: a scope in which everything is kept until memory is short.

Every value that autograd saves is held and can also be made again; the room evicts when it must. Values that
cannot be made again (Rules 9 and 12) are kept, or moved if there is a store or codec.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .._errors import ArgumentError
from .._units import format_bytes, parse_bytes
from ..codecs.chooser import shared
from ..policies import Decision, OpInfo, Policy
from ..stores import Store
from ..stores.names import resolve as resolve_store
from . import watching
from .effects import FACTS, facts_of
from .modules import Whereabouts
from .recorder import Recorder
from .replay import Handle
from .room import LEDGER, Room
from .scope import current_recorder, saving
from .tape import Tape
from .torch_private import never_compile, storage_key
from .values import Kept, Ref, Tensor


@dataclass(frozen=True)
class WithinBudget(Policy):
    """Note how to make everything again; the room decides what has to be."""

    budget_bytes: int
    always = Decision.RECOMPUTE
    needs_cost = True

    def decide(self, op: OpInfo) -> Decision:
        """Can be made again."""
        return Decision.RECOMPUTE

    def __repr__(self) -> str:
        return f"budget({format_bytes(self.budget_bytes)})"


class BudgetedRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder that makes room before every op, forward or backward."""

    watches_backward = True

    def __init__(self, policy: Policy, tape: Tape, whereabouts: Whereabouts, room: Room, verify: bool = False) -> None:
        super().__init__(policy, tape, whereabouts, verify)
        self.room = room

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = FACTS.get(id(func)) or facts_of(func)
        kwargs = kwargs or {}
        if facts.views:
            return facts.call(*args, **kwargs)
        noted = self.room.before(facts, args, kwargs)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.room.after(out, noted)
        return out

    def pack(self, tensor: Tensor) -> Handle | Kept:
        """The handle that autograd gets instead of `tensor`, which is held until memory is short."""
        storage, value = self._known(tensor)
        if value is None or storage is None or value.blank or type(self.policy) is not WithinBudget:
            return super().pack(tensor)
        if value.recipe is None and (value.origin is None or not self.room.moves):
            return super().pack(tensor)
        if not value.counted:
            value.counted = True
            self.tape.kept_values += 1
            self.tape.kept_bytes += value.nbytes
        if value.tensor is None:
            value.hold(tensor, storage, for_now=True)
            self.table[storage_key(storage)].put(value)
        self.room.admit(value)
        value.claims += 1
        handle = Handle(Ref(value, tensor), self.tape)
        if self.tape.first_handle is None:
            self.tape.first_handle = weakref.ref(handle)
        return handle


never_compile(BudgetedRecorder.__torch_dispatch__)
never_compile(BudgetedRecorder.pack)


class budget(saving):  # noqa: N801  (used like a function: `with budget("2 GiB"):`)
    """Hold all live tensor bytes of the process at or below `limit` while this block's code and its backward run.

    Values that autograd saves are kept while there is room, and evicted when there is not: dropped, to be made
    again in backward; compressed by one of `codecs`; or put into one of `stores`. No plan and no profile: shapes
    and control flow may change from step to step. Loss, gradients and buffers are bit-equal to those without it,
    unless a lossy codec is named. When nothing that could be evicted is left, `BudgetError` says what holds the
    memory. `lowtide.report().budget` has the peak and what was evicted.

    `limit` is in bytes, or a string such as "2 GiB", and counts everything: parameters, gradients, optimizer
    state, data, activations and temporaries. `stores` may name "disk" or be a `DiskStore(directory)`.

    >>> import torch, lowtide
    >>> x = torch.randn(64, 64, requires_grad=True)
    >>> with lowtide.budget("64 MiB"):
    ...     y = (x @ x).sin().exp().sum()
    >>> y.backward()
    >>> lowtide.report().budget.peak_bytes < 64 * 2**20
    True
    """

    def __init__(
        self,
        limit: str | int,
        *,
        stores: str | Store | Sequence[str | Store] | None = ("device",),
        codecs: str | Sequence[str] | None = "exact",
    ) -> None:
        self.limit_bytes = parse_bytes(limit)
        super().__init__(WithinBudget(self.limit_bytes))
        self._store = resolve_store(stores)
        self._chooser = shared(codecs)

    _nests = False

    def _open(self) -> Recorder:
        if current_recorder() is not None:
            raise ArgumentError("lowtide.budget(...) cannot be opened inside another scope: put it around that scope")
        room = self._room()
        count_what_is_there()
        room.peak_bytes = LEDGER.live_bytes
        room.clear(0, "what is there before the first op")
        tape = Tape(repr(self.policy), room)
        recorder = BudgetedRecorder(self.policy, tape, Whereabouts(self.policy, tape), room)
        watching.begin(room)
        return recorder

    def _room(self) -> Room:
        return Room(self.limit_bytes, self._store, self._chooser)

    def _closed(self, recorder: Recorder) -> None:
        assert isinstance(recorder, BudgetedRecorder)
        watching.end(recorder.room)


_SHARE_OF_TIME = 0.005
_counting = threading.Lock()
_hooks: list[Any] = []
_next_count = 0.0


def count_what_is_there() -> None:
    """Count what lives outside any scope. Looking at everything takes a while, so it is not done for every scope.

    In between, tensors are counted when an op makes or uses them, a model has them, or an optimizer has stepped.
    """
    global _next_count
    with _counting:
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(count_state))
        start = time.perf_counter()
        if start >= _next_count:
            LEDGER.see_everything()
            end = time.perf_counter()
            _next_count = end + (end - start) / _SHARE_OF_TIME


def count_state(optimizer: Optimizer, args: Any = None, kwargs: Any = None) -> None:
    """Count what an optimizer remembers."""
    for state in optimizer.state.values():
        LEDGER.see_all(state.values() if isinstance(state, dict) else ())
