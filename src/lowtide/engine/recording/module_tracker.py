"""The module tracker: which module is running, and in which layer.

Two global module hooks, installed while any scope is open, notify the tracker of their thread. They do nothing under
`torch.compile`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from ...policies import Policy
from ...torch_compat import reinstall_hook
from ..values.value import Location
from .layers import layers_of


class ModuleNames:
    """Names and layers of one root module. Created per scope, because models change between steps."""

    def __init__(self, root: nn.Module, policy: Policy) -> None:
        self.names = {id(m): name for name, m in root.named_modules()}
        self.layers: set[int] = set()
        if policy.needs_layers:
            self.layers = {id(m) for m in layers_of(root, policy.layers)}
            if not self.layers and policy.layers is None and next(root.parameters(), None) is not None:
                self.layers = {id(root)}  # nothing repeats: the model is one layer


class ModuleTracker:
    """The stack of running modules of one recorder."""

    def __init__(self, policy: Policy, on_root: Callable[[nn.Module], None]) -> None:
        """Create a tracker. `on_root` is called once for each model that is called."""
        self.policy = policy
        self.location = Location("", None, policy.needs_layers, False)
        self.layers_entered = 0
        self._on_root = on_root
        self._stack: list[Location] = []
        self._names: ModuleNames | None = None
        self._names_by_root: dict[int, tuple[weakref.ref[nn.Module], ModuleNames]] = {}

    def enter(self, module: nn.Module) -> None:
        """Called when the forward of a module begins."""
        here = self.location
        if not self._stack:
            self._names = self._names_of(module)
        self._stack.append(here)
        assert self._names is not None
        path = self._names.names.get(id(module))
        if path is None:  # not a registered child
            path = f"{here.path}.{type(module).__name__}" if here.path else type(module).__name__
        if here.layer is None and id(module) in self._names.layers:
            layer = self.layers_entered
            self.layers_entered = layer + 1
            self.location = Location(path, layer, self.policy.keeps_input_of(layer), False)
        else:
            outside_layers = here.layer is None and bool(self._names.layers)
            self.location = Location(path, here.layer, here.keeps_inputs, outside_layers)

    def leave(self) -> None:
        """Called when the forward of a module ends, also by an exception."""
        if self._stack:
            outside_layers = self.location.outside_layers
            self.location = self._stack.pop()
            if outside_layers and not self._stack:  # the loss of a layered model is outside its layers too
                self.location = self.location._replace(outside_layers=True)

    def _names_of(self, root: nn.Module) -> ModuleNames:
        key, known_names = id(root), self._names_by_root
        known = known_names.get(key)
        if known is None:
            self._on_root(root)
            ref = weakref.ref(root, lambda _: known_names.pop(key, None))
            known = known_names[key] = ref, ModuleNames(root, self.policy)
        return known[1]


class ModuleHooks:
    """The two global hooks, and the tracker of each thread."""

    def __init__(self) -> None:
        self._trackers: dict[int, ModuleTracker] = {}
        self._lock = threading.Lock()
        self._hooks: list[tuple[Any, Any]] = []

    def track(self, tracker: ModuleTracker) -> None:
        """Notify `tracker` of every module call in this thread."""
        with self._lock:
            if not self._trackers:
                self._install()
            self._trackers[threading.get_ident()] = tracker

    def untrack(self) -> None:
        """Stop in this thread. The hooks are removed with the last tracker."""
        with self._lock:
            self._trackers.pop(threading.get_ident(), None)
            if not self._trackers:
                for hook, _ in self._hooks:
                    hook.remove()

    def _install(self) -> None:
        """Install the hooks, always under the same ids: compiled code is recompiled if these change."""
        if not self._hooks:
            before, after = self._before, self._after
            self._hooks.append((nn_module.register_module_forward_pre_hook(before), before))
            self._hooks.append((nn_module.register_module_forward_hook(after, always_call=True), after))
        for handle, hook in self._hooks:
            reinstall_hook(handle, hook)

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        tracker = self._trackers.get(threading.get_ident())
        if tracker is not None:
            tracker.enter(module)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        tracker = self._trackers.get(threading.get_ident())
        if tracker is not None:
            tracker.leave()
