"""`fit`: train a model within a memory budget.

The first step with a step signature runs under the online budget and is profiled. Before the next such step a plan is
made, and later steps follow it. The model gets two hooks. It is not wrapped, and gets no attributes and no entries in
its state dict.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, overload

import torch
from torch import nn

from .._errors import ArgumentError, LowtideWarning
from .._units import parse_budget
from ..codecs.chooser import shared_chooser
from ..codecs.costs import measure_codec_costs
from ..codecs.names import resolve as resolve_codecs
from ..engine.runtime import current_runtime
from ..engine.scopes import saving
from ..engine.strategies.recording_costs import recording_costs
from ..planning import Plan
from ..records.scope_report import ScopeReport
from ..reporting.fit_report import FitReport
from ..stores import Store
from . import registry
from .fitted_model import FittedModel, device_of
from .plan_cache import PlanCache

M = TypeVar("M", bound=nn.Module)


@overload
def report() -> ScopeReport: ...
@overload
def report(model: nn.Module) -> FitReport: ...
def report(model: nn.Module | None = None) -> ScopeReport | FitReport:
    """Return the report of a fitted model, or without a model the report of the scope that was opened last.

    Raises `ArgumentError` if the model is not fitted, or if no scope has been opened yet.
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
    """Train `model` within a memory budget from now on. Return the same object.

    `budget` covers all live tensors of the process: parameters, gradients, optimizer state, data, activations and
    temporaries. Without a lossy codec, gradients are bit-equal to those of plain PyTorch.

    `optimizer`: its state is counted before each step. Without it, the state is counted after each optimizer step.
    `stores`: values may be offloaded to these stores, with and without a plan, if this is faster than recomputing them.
    `("device",)` allows no offloading, `("disk",)` allows a disk.
    `codecs`: a plan may compress values with codecs of known compressed size: bools and dropout masks at one bit per
    element, and lossy codecs that are named. Steps without a plan use all codecs (see `lowtide.budget`).
    `plan`: the first step follows this plan and is not profiled. The budget of the plan is the default of `budget`.
    `cache`: directory in which plans are saved. A later run of the same model, shapes and budget starts with them.
    `verify`: replay each op once in the profiled step, and keep the values of ops whose replay differs.

    Warns if gradient checkpointing is on, as after `model.gradient_checkpointing_enable()`.
    Raises `ArgumentError` for invalid arguments, and for a plan that needs other stores or codecs.

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
        raise ArgumentError(f"fit needs a torch.nn.Module, not {type(model).__name__}")
    if budget is None and plan is None:
        raise ArgumentError('fit needs a budget or a plan: fit(model, budget="8 GiB") or fit(model, plan=plan)')
    limit = parse_budget(budget) if budget is not None else plan.budget_bytes if plan is not None else 0
    store = current_runtime().store(stores)
    chooser = shared_chooser(codecs)
    if plan is not None and plan.link is not None and plan.in_store and store is None:
        raise ArgumentError(
            f"this plan offloads values to the store {plan.link.tier!r}, which fit may not use: pass "
            f"stores=({plan.link.tier!r},), or make a plan without offloading"
        )
    if plan is not None and plan.compress:
        named = {codec.name for codec in resolve_codecs(codecs)}
        if missing := sorted({codec_cost.codec for codec_cost in plan.codec_costs} - named):
            raise ArgumentError(
                f"this plan compresses values with {', '.join(map(repr, missing))}, which fit may not use: pass "
                f"codecs={tuple(sorted(named | set(missing)))!r}, or make a plan without these codecs"
            )
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        warnings.warn(
            "gradient checkpointing is on in this model, so its blocks run a second time in backward, and lowtide "
            "cannot choose what to recompute: call model.gradient_checkpointing_disable() before fit",
            LowtideWarning,
            stacklevel=2,
        )
    if plan is None:
        # Measured before the first step, so that their tensors do not count against the budget.
        recording_costs()
        device = device_of(model).type
        if chooser is not None and device != "meta":
            measure_codec_costs(chooser.allowed, {parameter.dtype for parameter in model.parameters()}, device)
    plan_cache = PlanCache(Path(cache)) if cache is not None else None
    state = FittedModel(model, limit, optimizer, store, chooser, plan, plan_cache, verify)
    registry.add(model, state)
    return model


def unfit(model: M) -> M:
    """Undo `fit`. Return the same object. Does nothing if the model is not fitted."""
    registry.remove(model)
    return model
