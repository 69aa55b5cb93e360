"""Fitted models, and the two hooks that report their calls."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from .._errors import ArgumentError
from .fitted_model import FittedModel
from .steps import fitting_state


class BeforeForward:
    """The hook that begins a step. It can be pickled, and does nothing in a model that is not fitted."""

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called."""
        fitted = fitting_state().models.get(model)
        if fitted is not None:
            fitted.before_forward(model, args, kwargs)


class AfterForward:
    """The hook that ends a forward pass."""

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """The model has returned or raised."""
        fitted = fitting_state().models.get(model)
        if fitted is not None:
            fitted.after_forward(failed=sys.exc_info()[0] is not None)


def add(model: nn.Module, fitted: FittedModel, *, hooked: bool = True) -> None:
    """Register a fitted model, in place of an earlier registration.

    Without `hooked` the caller must report the calls of the model.
    """
    remove(model)
    state = fitting_state()
    state.models[model] = fitted
    if hooked:
        state.hooks[model] = [
            model.register_forward_pre_hook(BeforeForward(), with_kwargs=True, prepend=True),
            model.register_forward_hook(AfterForward(), always_call=True),
        ]
    state.wrap_backward()


def remove(model: nn.Module) -> None:
    """Remove a model, if it is fitted."""
    state = fitting_state()
    fitted = state.models.pop(model, None)
    if fitted is not None:
        for hook in state.hooks.pop(model, ()):
            hook.remove()
        fitted.close()
    if not state.models:
        state.unwrap_backward()


def is_fitted(model: nn.Module) -> bool:
    """Return whether the model is fitted."""
    return model in fitting_state().models


def state_of(model: nn.Module) -> FittedModel:
    """Return the state of a fitted model. Raises `ArgumentError` if it is not fitted."""
    found: FittedModel | None = fitting_state().models.get(model)
    if found is None:
        raise ArgumentError("this model is not fitted: call lowtide.fit(model, budget=...) first")
    return found
