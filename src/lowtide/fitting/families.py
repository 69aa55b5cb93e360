"""Step families: steps with the same signature share a trace and a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..records import Plan, Trace
from ..torch_compat import tree_leaves
from .make_plan import shift


@dataclass
class StepFamily:
    """Steps with one signature: their trace, their plan, and how well they followed it."""

    trace: Trace | None = None
    bytes_before: int = 0
    """Bytes alive before the profiled step."""
    plan: Plan | None = None
    planned_for_bytes: int = 0
    """Bytes alive before a step, as the plan assumes."""
    grown_bytes: int = 0
    """Bytes alive before the present step, above `planned_for_bytes`."""
    margin_bytes: int = 0
    """Bytes by which earlier plans exceeded the limit."""
    followed_steps: int = 0
    left_plans: int = 0
    online: bool = False
    """Whether no plan fits, so that steps run under the online budget."""
    key: str = ""
    """Name in the plan cache."""

    def planned_trace(self) -> Trace | None:
        """Return the profiled step with the bytes before it that the plan assumes."""
        if self.trace is None or self.plan is None:
            return None
        return shift(self.trace, self.planned_for_bytes - self.bytes_before)


def signature_of(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return the step signature: shapes and dtypes of the inputs, whether gradients exist, autocast."""
    shapes = tuple((tuple(t.shape), t.dtype) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
    has_gradients = any(p.grad is not None for p in model.parameters())
    return (shapes, has_gradients, torch.is_autocast_enabled("cpu"))
