"""Finding the training steps of a script that knows nothing of lowtide, and fitting the models that take them.

A step begins with a call of a module with parameters to be trained, in training mode, with gradients enabled, and
with no other module's call around it in this thread. Every call of a module passes through `nn.Module.__call__`,
around which we stand: the models themselves get no hook and no attribute, and are copied and saved as ever. What
is odd is left alone, with a warning: the script runs then as it would without us.
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
from ..codecs.chooser import shared
from ..engine.runtime import current_runtime
from ..fitting import registry, steps
from ..fitting.fitted_model import FittedModel
from ..fitting.plan_cache import PlanCache
from ..stores.names import resolve as resolve_store
from ..torch_compat import graph_task, only_traced, saving_hooks_allowed
from .settings import Settings

_MOST_PAST = 8  # models that are gone, of which all is remembered; of more only the counts


class StepFinder:
    """Stands around the calls of modules, and remembers what it has fitted."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.fitted: list[tuple[str, FittedModel]] = []
        """The name of each model's class, and what is known about it, in the order in which they were met."""
        self._store = resolve_store(settings.store)
        self._chooser = shared(settings.codecs)
        self._plan_cache = PlanCache(settings.cache) if settings.cache is not None else None
        self._ours: set[FittedModel] = set()
        self._left_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._here = threading.local()

    def install(self) -> Callable[[], None]:
        """From now on; what is returned undoes it."""
        original = nn.Module.__call__
        nn.Module.__call__ = self._around(original)  # type: ignore[method-assign]

        def undo() -> None:
            nn.Module.__call__ = original  # type: ignore[method-assign]

        return undo

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        here = self._here

        @functools.wraps(original)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or getattr(here, "inside", False):
                return original(module, *args, **kwargs)
            state = self._begin(module, args, kwargs)
            here.inside = True
            returned = False
            try:
                out = original(module, *args, **kwargs)
                returned = True
                return out
            finally:
                here.inside = False
                if state is not None:
                    state.after_forward(failed=not returned)

        return call

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> FittedModel | None:
        """Begin a step, if this call does."""
        if not (model.training and torch.is_grad_enabled()):
            return None
        if graph_task() != -1:
            return None  # inside a backward pass, where checkpoints call modules again
        if only_traced() or torch.jit.is_tracing() or not saving_hooks_allowed():  # type: ignore[attr-defined, no-untyped-call]
            return None  # inside a transform of torch.func, or nothing is computed
        try:
            state = self._state_of(model)
            if state is not None:
                state.before_forward(model, args, kwargs)
        except BudgetError:
            raise
        except Exception as error:
            self._leave_alone(model, f"{type(error).__name__}: {error}")
            return None
        return state

    def _state_of(self, model: nn.Module) -> FittedModel | None:
        """What is known about a model whose calls are steps; None for other modules."""
        if registry.is_fitted(model):
            state = registry.state_of(model)
            return state if state in self._ours else None  # or the script has fitted it by itself
        if current_runtime().current_recorder() is not None or steps.is_in_forward() or model in self._left_alone:
            return None  # the former two: part of a step that has begun
        parameters = list(model.parameters())
        if not any(p.requires_grad for p in parameters):
            return None
        if any(is_lazy(p) or p.is_meta for p in parameters):
            return None  # not yet what it will be
        if any(hasattr(p, "full_tensor") for p in parameters):
            self._leave_alone(model, "its parameters are sharded (FSDP, DTensor), which lowtide run does not cover yet")
            return None
        return self._fit(model)

    def _fit(self, model: nn.Module) -> FittedModel:
        limit = self.settings.budget_bytes
        state = FittedModel(model, limit, None, self._store, self._chooser, None, self._plan_cache, verify=True)
        registry.enter(model, state, hooked=False)
        self.fitted.append((type(model).__name__, state))
        self._ours.add(state)
        past = [state for _, state in self.fitted if state.is_gone]
        for old in past[:-_MOST_PAST]:
            old.families.clear()
        return state

    def _leave_alone(self, model: nn.Module, why: str) -> None:
        registry.leave(model)
        self._left_alone.add(model)
        warnings.warn(
            f"{type(model).__name__} trains without a budget, as it would without lowtide: {why}",
            LowtideWarning,
            stacklevel=4,
        )
