"""Which models are fitted, and the two hooks by which they say that they are called."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

from .._errors import ArgumentError
from . import steps
from .fitted import Fitted

_states: weakref.WeakKeyDictionary[nn.Module, Fitted] = weakref.WeakKeyDictionary()
_hooks: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


class BeforeForward:
    """The hook that begins a step. Pickles as itself, and does nothing in a model that is not fitted."""

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The model is called."""
        state = _states.get(model)
        if state is not None:
            state.before_forward(model, args, kwargs)


class AfterForward:
    """The hook that ends a forward pass."""

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """The model has returned, or raised."""
        state = _states.get(model)
        if state is not None:
            state.after_forward(failed=sys.exc_info()[0] is not None)


def enter(model: nn.Module, state: Fitted, *, hooked: bool = True) -> None:
    """The model is fitted from now on; if it was, then anew. Not `hooked`: somebody else tells the state of calls."""
    leave(model)
    _states[model] = state
    if hooked:
        _hooks[model] = [
            model.register_forward_pre_hook(BeforeForward(), with_kwargs=True, prepend=True),
            model.register_forward_hook(AfterForward(), always_call=True),
        ]
    steps.watch_backward()


def leave(model: nn.Module) -> None:
    """The model is not fitted any more; nothing happens if it was not."""
    state = _states.pop(model, None)
    if state is not None:
        for hook in _hooks.pop(model, ()):
            hook.remove()
        state.close()
    if not _states:
        steps.leave_backward_alone()


def is_fitted(model: nn.Module) -> bool:
    """Whether calls of this model are steps."""
    return model in _states


def state_of(model: nn.Module) -> Fitted:
    """What is known about a fitted model."""
    state = _states.get(model)
    if state is None:
        raise ArgumentError("this model is not fitted: call lowtide.fit(model, budget=...) first")
    return state
