"""`budget`: keep values until memory is short, then evict."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from ..._errors import ArgumentError
from ..._units import parse_budget
from ...codecs.chooser import shared_chooser
from ...stores import Store
from ..memory.budget import MemoryBudget
from ..runtime import current_runtime
from ..strategies.online import OnlineStrategy, WithinBudget
from .recording_scope import RecordingScope, make_recorder


class budget:  # noqa: N801  (used like a function: `with budget("2 GiB"):`)
    """Keep all live tensor bytes of the device at or below `limit` while this block and its backward run.

    Values that autograd saves are kept while they fit. Then they are evicted: dropped and recomputed in backward,
    compressed by one of `codecs`, or offloaded to one of `stores`. There is no plan and no profile: shapes and
    control flow may change from step to step. Loss, gradients and buffers are bit-equal to those without the block,
    unless a lossy codec is named. If nothing more can be evicted, `BudgetError` says what uses the memory.
    `lowtide.report().budget` has the peak and the evictions.

    `limit` is a string such as "2 GiB", or a number of bytes. It counts everything: parameters, gradients, optimizer
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
        self.limit_bytes = parse_budget(limit)
        self._store = current_runtime().store(stores)
        self._chooser = shared_chooser(codecs)
        self._scope: RecordingScope | None = None

    def __enter__(self) -> budget:
        if self._scope is not None:
            raise ArgumentError("this scope is open already: make a new lowtide.budget(...) for each block")
        if not torch.is_grad_enabled():
            return self
        runtime = current_runtime()
        if runtime.current_recorder() is not None:
            raise ArgumentError("lowtide.budget(...) cannot be opened inside another scope: put it around that scope")
        memory_budget = self.open_budget()
        policy = WithinBudget(self.limit_bytes)
        recorder = make_recorder(OnlineStrategy(memory_budget), policy, memory_budget=memory_budget)
        scope = RecordingScope(runtime, recorder)
        scope.open()
        self._scope = scope
        return self

    def open_budget(self) -> MemoryBudget:
        """Return a new memory budget. Raises `BudgetError` if parameters and data alone exceed it."""
        memory = current_runtime().memory()
        memory.recount()
        memory_budget = MemoryBudget(memory, self.limit_bytes, self._store, self._chooser)
        memory_budget.make_room_to_start()
        return memory_budget

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()
