"""Fitted models, and the two hooks that report their calls.

`copy.deepcopy` copies the hooks with the model. The hooks of the copy know the settings of the original, and fit the
copy at its first call, or when `fit`, `unfit` or `report` asks for its state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from .._errors import ArgumentError
from ..torch_compat import forward_pre_hooks_of, remove_forward_hooks
from .fitted_model import FittedModel
from .steps import fitting_state


class BeforeForward:
    """The hook that begins a step. It can be pickled, and does nothing in a model that is not fitted."""

    def __init__(self, make_state: Callable[[nn.Module], FittedModel] | None = None) -> None:
        """`make_state` returns the state of a copy of the model."""
        self._make_state = make_state
        self._is_copy = False

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called."""
        fitted = _find(model)
        if fitted is not None:
            fitted.before_forward(model, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> BeforeForward:
        copy = BeforeForward(self._make_state)
        copy._is_copy = True
        return copy

    def __reduce__(self) -> tuple[type[BeforeForward], tuple[()]]:
        return BeforeForward, ()

    def state_for_copy(self, model: nn.Module) -> FittedModel | None:
        """Return a new state if this hook is in a copy of a fitted model, else None."""
        return self._make_state(model) if self._is_copy and self._make_state is not None else None


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
    _add(model, fitted, hooked)


def _add(model: nn.Module, fitted: FittedModel, hooked: bool = True) -> None:
    state = fitting_state()
    state.models[model] = fitted
    if hooked:
        state.hooks[model] = [
            model.register_forward_pre_hook(BeforeForward(fitted.state_maker()), with_kwargs=True, prepend=True),
            model.register_forward_hook(AfterForward(), always_call=True),
        ]
    state.install()


def _find(model: nn.Module) -> FittedModel | None:
    """Return the state of a fitted model, or None. The first time for a copy, make its state."""
    found: FittedModel | None = fitting_state().models.get(model)
    if found is not None:
        return found
    for hook in forward_pre_hooks_of(model):
        if isinstance(hook, BeforeForward) and (fitted := hook.state_for_copy(model)) is not None:
            remove_forward_hooks(model, (BeforeForward, AfterForward))
            _add(model, fitted)
            return fitted
    return None


def remove(model: nn.Module) -> None:
    """Remove a model, if it is fitted."""
    fitted = _find(model)
    state = fitting_state()
    if fitted is not None:
        del state.models[model]
        for hook in state.hooks.pop(model, ()):
            hook.remove()
        fitted.close()
    if not state.models:
        state.uninstall()


def is_fitted(model: nn.Module) -> bool:
    """Return whether the model is fitted."""
    return _find(model) is not None


def state_of(model: nn.Module) -> FittedModel:
    """Return the state of a fitted model. Raises `ArgumentError` if it is not fitted."""
    found = _find(model)
    if found is None:
        raise ArgumentError("this model is not fitted: call lowtide.fit(model, budget=...) first")
    return found
