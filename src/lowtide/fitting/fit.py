"""`fit`: a model that trains within a byte budget from now on, with a plan of its own.

The first step of each kind (shapes of the inputs, gradients there or not) runs under the online budget and is
profiled; before the next one a plan is made, and obeyed from then on. The model itself gets two hooks and nothing
else: no wrapper, no attribute, no entry in its state.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, overload

import torch
from torch import nn

from .._errors import ArgumentError
from .._units import parse_bytes
from ..codecs.chooser import shared_chooser
from ..codecs.names import resolve as resolve_codecs
from ..engine.scopes import saving
from ..engine.strategies.recording_costs import recording_costs
from ..planning import Plan
from ..records.scope_report import ScopeReport
from ..reporting.fit_report import FitReport
from ..stores import Store
from ..stores.names import resolve as resolve_store
from . import registry
from .fitted_model import FittedModel
from .plan_cache import PlanCache

M = TypeVar("M", bound=nn.Module)


@overload
def report() -> ScopeReport: ...
@overload
def report(model: nn.Module) -> FitReport: ...
def report(model: nn.Module | None = None) -> ScopeReport | FitReport:
    """What happened: in the scope that was opened last, or in the steps of a fitted model.

    Raises `ArgumentError` if nothing has been recorded yet.
    """
    if model is None:
        return saving.report()
    return registry.state_of(model).report()


def fit(
    model: M,
    budget: str | int | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    stores: str | Store | Sequence[str | Store] | None = ("device",),
    codecs: str | Sequence[str] | None = "exact",
    plan: Plan | None = None,
    cache: str | os.PathLike[str] | None = None,
    verify: bool = True,
) -> M:
    """Have `model` train within `budget` bytes from now on; the same object, nothing else in the script changes.

    The budget counts all live tensors of the process: parameters, gradients, the optimizer's state, data,
    activations, temporaries. With `plan` (from `lowtide.plan`) the first step follows it without profiling, and
    `budget` is the plan's unless given. `cache` is a directory in which plans are kept for the next run of the same
    model, shapes and budget, which then starts with them. `verify` replays each op once in the profiled step and
    pins those that do not reproduce. With `stores=("disk",)` a plan may also let values wait on a disk between forward
    and backward, where that is quicker than making them again. By `codecs` a plan may hold values packed whose size is
    then known beforehand (bools and dropout masks at a bit an element; the lossy codecs, which are used only where they
    are named), and steps without a plan use all of them (see `lowtide.budget`). Unless a lossy codec is named,
    gradients are bit-equal to those without lowtide.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    >>> model = lowtide.fit(model, budget="64 MiB")
    >>> for _ in range(3):
    ...     model(torch.randn(4, 8)).square().mean().backward()
    >>> lowtide.report(model).steps
    3
    >>> _ = lowtide.unfit(model)
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"fit takes a torch.nn.Module, not {type(model).__name__}")
    if budget is None and plan is None:
        raise ArgumentError('how much memory may it take? fit(model, budget="8 GiB"), or a plan: fit(model, plan=plan)')
    limit = parse_bytes(budget) if budget is not None else plan.budget_bytes if plan is not None else 0
    store = resolve_store(stores)
    if plan is not None and plan.link is not None and plan.in_store and store is None:
        raise ArgumentError(
            f"this plan has values wait on the {plan.link.tier}, and fit may not use it: pass "
            f"stores=({plan.link.tier!r},), or make a plan without"
        )
    if plan is not None and plan.compress:
        named = {codec.name for codec in resolve_codecs(codecs)}
        if missing := sorted({codec_cost.codec for codec_cost in plan.codec_costs} - named):
            raise ArgumentError(
                f"this plan holds values packed by {', '.join(map(repr, missing))}, and fit may not use it: pass "
                f"codecs={tuple(sorted(named | set(missing)))!r}, or make a plan without"
            )
    if plan is None:
        recording_costs()  # measured before the first step, so that its tensors do not count against the budget
    plan_cache = PlanCache(Path(cache)) if cache is not None else None
    state = FittedModel(model, limit, optimizer, store, shared_chooser(codecs), plan, plan_cache, verify)
    registry.add(model, state)
    return model


def unfit(model: M) -> M:
    """The model as it was before `fit`; nothing happens if it was not fitted."""
    registry.remove(model)
    return model
