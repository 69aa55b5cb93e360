"""Find the training steps of a script that does not use lowtide, and fit the models.

A step begins with a call of a module that is in training mode and has trainable parameters, with gradients
enabled, outside the call of any other module in the same thread. Such a module is a model. A module that is called
during a step, on a result of another module, is a part of a model, for example its head.

`StepFinder.install` wraps `nn.Module.__call__`. The models get no hooks and no attributes, so copies and pickles
stay unchanged. A model that lowtide cannot handle is skipped with a warning and trains without a budget.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .._errors import BudgetError, LowtideWarning
from ..codecs.chooser import shared_chooser
from ..engine.runtime import current_runtime
from ..fitting import registry
from ..fitting.fitted_model import FittedModel
from ..fitting.plan_cache import PlanCache
from ..fitting.steps import fitting_state
from ..torch_compat import graph_task, is_tracing_only, saved_tensor_hooks_allowed, tree_leaves
from .settings import Settings

_MAX_FREED_MODELS = 8
"""Freed models whose plans and traces are retained for the summary. Doubled: more host memory in scripts that
create many models, more models with full details in the summary."""


class StepFinder:
    """Wraps `nn.Module.__call__` and fits each model at its first training step."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.fitted: list[tuple[str, FittedModel]] = []
        """Class name and state of each fitted model, in order of the first step."""
        self.skipped: list[tuple[str, str]] = []
        """Class name of each model that trained without a budget, and why."""
        self._store = current_runtime().store(settings.store)
        self._chooser = shared_chooser(settings.codecs)
        self._plan_cache = PlanCache(settings.cache) if settings.cache is not None else None
        self._own: set[FittedModel] = set()
        self._skipped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._thread = threading.local()

    def install(self) -> Callable[[], None]:
        """Wrap `nn.Module.__call__`. Return a function that restores the original."""
        original = nn.Module.__call__
        nn.Module.__call__ = self._wrap(original)  # type: ignore[method-assign]

        def uninstall() -> None:
            nn.Module.__call__ = original  # type: ignore[method-assign]

        return uninstall

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        @functools.wraps(original)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(thread, "in_call", False):
                return original(module, *args, **kwargs)
            fitted = self._begin_step(module, args, kwargs)
            thread.in_call = True
            returned = False
            try:
                out = original(module, *args, **kwargs)
                returned = True
                return out
            finally:
                thread.in_call = False
                if fitted is not None:
                    fitted.after_forward(failed=not returned)

        return call

    def _begin_step(self, model: nn.Module, args: Any, kwargs: Any) -> FittedModel | None:
        """Begin a step if this call is a training step. Return the state of the model, else None."""
        if not (model.training and torch.is_grad_enabled()):
            return None
        if graph_task() != -1:
            return None  # in a backward pass: torch.utils.checkpoint calls modules a second time
        if is_tracing_only() or torch.jit.is_tracing() or not saved_tensor_hooks_allowed():  # type: ignore[attr-defined, no-untyped-call]
            return None  # fake tensors, jit tracing, torch.func transforms
        try:
            fitted = self._fitted_model(model, args, kwargs)
            if fitted is not None:
                fitted.before_forward(model, args, kwargs)
        except BudgetError:
            raise
        except Exception as error:
            self._skip(model, f"{type(error).__name__}: {error}")
            return None
        return fitted

    def _fitted_model(self, model: nn.Module, args: Any, kwargs: Any) -> FittedModel | None:
        """Return the state of the model, fitted now if needed. Return None if this call belongs to no model of ours."""
        if registry.is_fitted(model):
            fitted = registry.state_of(model)
            return fitted if fitted in self._own else None  # the script may call lowtide.fit itself
        step = fitting_state().step
        recorder = current_runtime().current_recorder()
        if recorder is not None and (step is None or recorder is not step.recorder):
            return None  # inside a scope of the script
        if step is not None and step.covers_code_outside and _has_graph(args, kwargs):
            return None  # part of a model
        if model in self._skipped:
            return None
        parameters = list(model.parameters())
        if not any(p.requires_grad for p in parameters):
            return None
        if any(is_lazy(p) or p.is_meta for p in parameters):
            return None  # not initialised yet
        if any(hasattr(p, "full_tensor") for p in parameters):
            self._skip(model, "lowtide run does not support sharded parameters (FSDP, DTensor) yet")
            return None
        return self._fit(model)

    def _fit(self, model: nn.Module) -> FittedModel:
        fitted = FittedModel(
            model,
            self.settings.budget_bytes,
            optimizer=None,
            store=self._store,
            chooser=self._chooser,
            plan=None,
            plan_cache=self._plan_cache,
            verify=True,
        )
        registry.add(model, fitted, hooked=False)
        self.fitted.append((type(model).__name__, fitted))
        self._own.add(fitted)
        freed = [other for _, other in self.fitted if other.is_gone]
        for other in freed[:-_MAX_FREED_MODELS]:
            other.families.clear()
        return fitted

    def _skip(self, model: nn.Module, reason: str) -> None:
        """Run the model without lowtide from now on, and warn once."""
        registry.remove(model)
        self._skipped.add(model)
        self.skipped.append((type(model).__name__, reason))
        warnings.warn(f"{type(model).__name__} trains without a budget: {reason}", LowtideWarning, stacklevel=4)


def _has_graph(args: Any, kwargs: Any) -> bool:
    """Return whether an argument is a result that autograd can differentiate."""
    return any(isinstance(t, torch.Tensor) and t.grad_fn is not None for t in tree_leaves((args, kwargs)))
