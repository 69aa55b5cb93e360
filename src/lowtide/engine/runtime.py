"""The runtime: all state of one process.

A runtime owns the memory of each device, the open scopes, the watched backward passes and the fitted models. Code that
opens a scope or a step calls `current_runtime` once and passes parts of the runtime on. Tests use a fresh one:
`with fresh_runtime(): ...`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..stores import Store
from ..stores.names import create, resolve
from .memory.device_memory import DeviceMemory, default_device
from .recording.backward import BackwardWatcher
from .recording.module_tracker import ModuleHooks
from .recording.recorder import Recorder
from .values.replay_context import ReplayContext


class Runtime:
    """The state of one process."""

    def __init__(self) -> None:
        self.backward = BackwardWatcher()
        self.module_hooks = ModuleHooks()
        self.last_context: ReplayContext | None = None
        """The context of the scope that was opened last, in any thread."""
        self.fitting: Any = None
        """Open steps and fitted models (`lowtide.fitting`), created on first use."""
        self._memories: dict[torch.device, DeviceMemory] = {}
        self._stores: dict[str, Store] = {}  # by name, shared by all models; closed on exit
        self._recorders: dict[int, Recorder] = {}
        self._optimizer_hook: Any = None
        self._lock = threading.Lock()

    def memory(self, device: torch.device | None = None) -> DeviceMemory:
        """Return the memory of a device; by default the accelerator if there is one, else the CPU."""
        key = default_device() if device is None else device
        with self._lock:
            found = self._memories.get(key)
            if found is None:
                found = self._memories[key] = DeviceMemory(key)
            if self._optimizer_hook is None:
                self._optimizer_hook = register_optimizer_step_post_hook(self._count_optimizer)
            return found

    def store(self, stores: str | Store | Sequence[str | Store] | None) -> Store | None:
        """Return the first store other than "device", or None. Stores that are given by name are shared."""
        return resolve(stores, self._store_named)

    def _store_named(self, name: str) -> Store:
        with self._lock:
            if name not in self._stores:
                self._stores[name] = create(name)
            return self._stores[name]

    def count_optimizer(self, optimizer: Optimizer) -> None:
        """Count the state of an optimizer."""
        for memory in list(self._memories.values()):
            for state in optimizer.state.values():
                memory.ledger.count_all(state.values() if isinstance(state, dict) else ())

    def _count_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.count_optimizer(optimizer)

    def current_recorder(self) -> Recorder | None:
        """Return the recorder of the scope that is open in this thread."""
        return self._recorders.get(threading.get_ident())

    def open_scope(self, recorder: Recorder) -> None:
        """Make `recorder` the current one of this thread."""
        self.module_hooks.track(recorder.tracker)
        self._recorders[threading.get_ident()] = recorder
        self.last_context = recorder.context

    def close_scope(self) -> None:
        """Remove the recorder of this thread."""
        self._recorders.pop(threading.get_ident(), None)
        self.module_hooks.untrack()

    def close(self) -> None:
        """Remove the optimizer hook and close the stores."""
        for store in self._stores.values():
            store.close()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
            self._optimizer_hook = None


_current = Runtime()  # the only mutable state of a module


def current_runtime() -> Runtime:
    """Return the runtime of this process."""
    return _current


@contextlib.contextmanager
def fresh_runtime() -> Iterator[Runtime]:
    """Use a new runtime inside the block, for tests. It has no scopes and no fitted models."""
    global _current
    outer, _current = _current, Runtime()
    try:
        yield _current
    finally:
        _current.close()
        _current = outer
