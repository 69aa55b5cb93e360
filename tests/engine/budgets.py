"""Steps within a budget, and memory budgets that evict at random."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

import lowtide
from lowtide.codecs import Chooser
from lowtide.engine.memory.budget import MemoryBudget
from lowtide.engine.memory.ledger import Ledger
from lowtide.engine.runtime import current_runtime
from lowtide.engine.values.value import Value
from lowtide.torch_compat import tree_leaves
from tests.runtimes import ledger, pool

from .steps import Step, run_step


def fixed_bytes(model: nn.Module, batch: Any) -> int:
    """Return the bytes of parameters, buffers and batch. Each storage counts once."""
    own = Ledger()
    own.count_all([*model.parameters(), *model.buffers(), *tree_leaves(batch)])
    return own.live_bytes


class above(lowtide.budget):  # noqa: N801
    """A budget of `more` bytes above the live bytes of the process when it opens."""

    def __init__(self, more: int, **options: Any) -> None:
        super().__init__(f"{more} B", **options)
        self.more = more

    def open_budget(self) -> MemoryBudget:
        gc.collect()
        ledger().count_everything()
        self.limit_bytes = ledger().live_bytes + self.more
        return super().open_budget()


def step_within(model: nn.Module, batch: Any, plain: Step, share: float, **options: Any) -> tuple[Step, int]:
    """Run a step with `share` of the plain activation memory. Return it and its budget without tensors of the test."""
    fixed = fixed_bytes(model, batch)
    activations = int(share * (plain.peak_bytes - fixed))
    return run_step(model, batch, above(activations, **options)), fixed + activations


class RandomEvictionBudget(MemoryBudget):
    """A memory budget that evicts at random before every op."""

    def __init__(self, seed: int, store: Any, chooser: Any, share: float = 0.5) -> None:
        super().__init__(current_runtime().memory(), 2**60, store, chooser)
        self.random = random.Random(seed)
        self.share = share

    def make_room(self, nbytes: int, what: str, strictly: bool = True) -> None:
        if self._evicting:
            return

        def evict() -> None:
            candidates = [value for value in self.pool.all() if self._score(value) is not None]
            for value in self.random.sample(candidates, int(len(candidates) * self.share)):
                self.random.choice(self.ways(value))(value)

        with self.lock:
            self._guarded(evict)

    def ways(self, value: Value) -> Sequence[Callable[[Value], None]]:
        ways: list[Callable[[Value], None]] = []
        if value.recipe is not None:
            ways.append(self._drop)
        if self.offloading is not None:
            ways.append(self.offloading.evict)
        if self.compression is not None:
            ways.append(self.compression.evict)
        return ways


class random_eviction(lowtide.budget):  # noqa: N801
    """A budget scope that evicts at random."""

    def __init__(self, seed: int, share: float = 0.5, **options: Any) -> None:
        super().__init__(2**60, **options)
        self.seed = seed
        self.share = share
        if self._chooser is not None:  # also where recomputing would be cheaper
            self._chooser = Chooser(self._chooser.allowed, min_ratio=1.01, min_saved_bytes=1, min_bytes_per_second=1)

    def open_budget(self) -> MemoryBudget:
        return RandomEvictionBudget(self.seed, self._store, self._chooser, self.share)


def nothing_evictable_left() -> bool:
    gc.collect()
    return pool().is_empty()
