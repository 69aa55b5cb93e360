"""Kinds of steps: those with the same shapes and state are alike, and share a trace and a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..engine.attention import Lesson
from ..planning import Plan
from ..trace import Trace
from .solving import shift


@dataclass
class Kind:
    """Steps alike: what was seen of them, and the plan."""

    trace: Trace | None = None
    outside_bytes: int = 0  # alive before the profiled step
    plan: Plan | None = None
    planned_for: int = 0  # bytes alive outside, for which the plan was made
    grown_bytes: int = 0  # by which there are more now
    margin_bytes: int = 0  # by which plans turned out to be too bold
    learnt: tuple[Plan, Lesson] | None = None  # where a recorder is needed while this plan is obeyed
    wakeful: bool = False  # what was learnt of one step did not hold for another
    obeyed: int = 0
    left: int = 0
    online: bool = False
    key: str = ""  # in the cache

    def planned_trace(self) -> Trace | None:
        """The profiled step as the plan was made for it: with what was alive beside it then."""
        if self.trace is None or self.plan is None:
            return None
        return shift(self.trace, self.planned_for - self.outside_bytes)


def signature_of(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What steps alike have in common: shapes and types of the inputs, gradients there or not, autocast."""
    shapes = tuple((tuple(t.shape), t.dtype) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    has_gradients = any(p.grad is not None for p in model.parameters())
    return (shapes, has_gradients, torch.is_autocast_enabled("cpu"))
