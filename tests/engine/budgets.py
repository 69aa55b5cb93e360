"""Running steps within budgets, and rooms that evict for no reason."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

import lowtide
from lowtide.codecs import Chooser
from lowtide.engine.ledger import Ledger
from lowtide.engine.room import LEDGER, POOL, Room
from lowtide.engine.values import Value

from .steps import Step, run_step


def fixed_bytes(model: nn.Module, batch: Any) -> int:
    """Parameters, buffers and batch, each storage once."""
    ledger = Ledger()
    ledger.see_all([*model.parameters(), *model.buffers(), *tree_leaves(batch)])
    return ledger.live_bytes


class above(lowtide.budget):  # noqa: N801
    """A budget of so much more than all tensors of the process have, the test's own included, when it opens."""

    def __init__(self, more: int, **options: Any) -> None:
        super().__init__(more, **options)
        self.more = more

    def _room(self) -> Room:
        gc.collect()
        LEDGER.see_everything()
        self.limit_bytes = LEDGER.live_bytes + self.more
        return super()._room()


def step_within(model: nn.Module, batch: Any, plain: Step, share: float, **options: Any) -> tuple[Step, int]:
    """A step with `share` of plain's activation memory; and the budget, without what only the test holds."""
    fixed = fixed_bytes(model, batch)
    activations = int(share * (plain.peak_bytes - fixed))
    return run_step(model, batch, above(activations, **options)), fixed + activations


class Restless(Room):
    """A room that evicts at random before every op, as long as anything can be evicted."""

    def __init__(self, seed: int, store: Any, chooser: Any, share: float = 0.5) -> None:
        super().__init__(2**60, store, chooser)
        self.random = random.Random(seed)
        self.share = share

    def clear(self, nbytes: int, what: str, strictly: bool = True) -> None:
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
        if self.compressing is not None:
            ways.append(self.compressing.evict)
        return ways


class restless(lowtide.budget):  # noqa: N801
    """A budget scope with a restless room."""

    def __init__(self, seed: int, share: float = 0.5, **options: Any) -> None:
        super().__init__(2**60, **options)
        self.seed = seed
        self.share = share
        if self._chooser is not None:  # also where it does not pay
            self._chooser = Chooser(self._chooser.allowed, min_ratio=1.01, min_saved_bytes=1, min_bytes_per_second=1)

    def _room(self) -> Room:
        return Restless(self.seed, self._store, self._chooser, self.share)


def nothing_evictable_left() -> bool:
    gc.collect()
    return POOL.is_empty()
