"""One op that has run under a recorder."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.facts import OpFacts
from ..ops.rng import Draw
from ..values.value import Location, Tensor
from .inplace import Written

Fresh = tuple[int, Tensor, torch.UntypedStorage, int]
"""A result with new memory: its position among the results, the tensor, its storage, the storage's key."""


class RecordedOp:
    """One op: its arguments, results and effects."""

    __slots__ = (
        "args",
        "cost_us",
        "draw",
        "facts",
        "fresh",
        "kwargs",
        "location",
        "number",
        "out",
        "recompute_us",
        "writes",
    )

    def __init__(
        self,
        number: int,
        facts: OpFacts,
        location: Location,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        fresh: tuple[Fresh, ...],
        draw: Draw | None,
        writes: tuple[Written, ...],
        cost_us: float,
    ) -> None:
        self.number = number
        self.facts = facts
        self.location = location
        self.args = args
        self.kwargs = kwargs
        self.out = out
        self.fresh = fresh
        self.draw = draw
        self.writes = writes
        self.cost_us = cost_us
        self.recompute_us = cost_us  # a strategy may add the time of the inputs

    @property
    def bytes_made(self) -> int:
        """Bytes of new and overwritten storages."""
        if len(self.fresh) == 1 and not self.writes:  # the common case
            return self.fresh[0][2].nbytes()
        return sum(f[2].nbytes() for f in self.fresh) + sum(w.storage.nbytes() for w in self.writes)
