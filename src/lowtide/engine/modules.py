"""Where in the model the code is: the path of the running module, and which layer it is in.

Two global module hooks, installed while any scope is open, tell the recorder of their own thread. They
change nothing, and fold away under `torch.compile`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ..policies import Policy
from .layers import layers_of
from .tape import Tape
from .torch_private import put_back_hook
from .values import Place


class Map:
    """Names and layers of one root module. Made anew a scope: models change between steps."""

    def __init__(self, root: nn.Module, policy: Policy) -> None:
        self.names = {id(m): name for name, m in root.named_modules()}
        self.layers: set[int] = set()
        if policy.needs_layers:
            self.layers = {id(m) for m in layers_of(root, policy.layers)}
            if not self.layers and policy.layers is None and next(root.parameters(), None) is not None:
                self.layers = {id(root)}  # nothing repeats: the model is one layer


class Whereabouts:
    """The stack of running modules of one recorder."""

    def __init__(self, policy: Policy, tape: Tape) -> None:
        self.policy = policy
        self._tape = tape
        self.place = Place("", None, policy.needs_layers, False)
        self.calls = 0
        self.layers_entered = 0
        self._stack: list[Place] = []
        self._map: Map | None = None
        self._maps: dict[int, tuple[weakref.ref[nn.Module], Map]] = {}

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins."""
        self.calls += 1
        here = self.place
        if not self._stack:
            self._map = self._map_of(module)
        self._stack.append(here)
        assert self._map is not None
        path = self._map.names.get(id(module))
        if path is None:  # not a registered child: a free module that is called from inside
            path = f"{here.path}.{type(module).__name__}" if here.path else type(module).__name__
        if here.layer is None and id(module) in self._map.layers:
            layer = self.layers_entered
            self.layers_entered = layer + 1
            self.place = Place(path, layer, self.policy.keeps_input_of(layer), False)
        else:
            self.place = Place(path, here.layer, here.keeps_inputs, here.layer is None and bool(self._map.layers))

    def _map_of(self, root: nn.Module) -> Map:
        key, maps = id(root), self._maps
        known = maps.get(key)
        if known is None:
            self._tape.saw_root(root)
            known = maps[key] = weakref.ref(root, lambda _: maps.pop(key, None)), Map(root, self.policy)
        return known[1]

    def leave(self) -> None:
        """A module's forward ends, also by an exception."""
        if self._stack:
            outside_layers = self.place.outside_layers
            self.place = self._stack.pop()
            if outside_layers and not self._stack:  # the loss of a layered model is outside its layers too
                self.place = self.place._replace(outside_layers=True)

    def ended(self) -> None:
        """The scope ends."""


_open: dict[int, Whereabouts] = {}
_lock = threading.Lock()
_hooks: list[Any] = []


def track(whereabouts: Whereabouts) -> None:
    """Tell `whereabouts` of every module call in this thread from now on."""
    with _lock:
        if not _open:
            _put_in_place()
        _open[threading.get_ident()] = whereabouts


def untrack() -> None:
    """Stop; the hooks go with the last one tracked."""
    with _lock:
        whereabouts = _open.pop(threading.get_ident(), None)
        if not _open:
            for hook, _ in _hooks:
                hook.remove()
    if whereabouts is not None:
        whereabouts.ended()


def _put_in_place() -> None:
    """Install the hooks, always under the same numbers: compiled code is compiled again where these change."""
    if not _hooks:
        _hooks.append((nn_module.register_module_forward_pre_hook(_before), _before))
        _hooks.append((nn_module.register_module_forward_hook(_after, always_call=True), _after))
    for handle, hook in _hooks:
        put_back_hook(handle, hook)


def _before(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    whereabouts = _open.get(threading.get_ident())
    if whereabouts is not None:
        whereabouts.enter(module)


def _after(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    whereabouts = _open.get(threading.get_ident())
    if whereabouts is not None:
        whereabouts.leave()
