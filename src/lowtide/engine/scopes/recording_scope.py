"""A recording scope: installs a recorder and its saved-tensor hooks, and removes them again.

Inside a level of forward-mode AD recording is off. The formulas for tangents compute other bits under a dispatch mode,
and their zero tensors have no memory. What is saved there is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ...policies import Policy
from ...torch_compat import (
    exit_hooks,
    exit_mode,
    graph_task,
    in_dual_level,
    innermost_mode,
    on_dual_level,
    suspend_innermost_mode,
)
from ..memory.budget import MemoryBudget
from ..recording.backward import suspend_for_formula
from ..recording.module_tracker import ModuleTracker
from ..recording.recorder import Recorder
from ..recording.verifier import Verifier
from ..runtime import Runtime
from ..strategies.base import Strategy
from ..values.handles import AnyHandle
from ..values.replay_context import ReplayContext
from ..values.scope_counts import ScopeCounts
from ..values.value import Tensor


def make_recorder(
    strategy: Strategy,
    policy: Policy,
    *,
    name: str = "",
    memory_budget: MemoryBudget | None = None,
    verify: bool = False,
) -> Recorder:
    """Return a recorder that is ready to be installed.

    `name` is shown in the report, by default the policy. `memory_budget` is used from the start.
    """
    context = ReplayContext(ScopeCounts(name or repr(policy)), memory_budget)

    def on_root(root: torch.nn.Module) -> None:
        context.add_root(root)
        recorder.strategy.root_called(root)

    tracker = ModuleTracker(policy, on_root)
    reproduced = memory_budget.memory.reproduced if memory_budget is not None else None
    verifier = Verifier(context, memory_budget, reproduced) if verify else None
    recorder = Recorder(strategy, context, tracker, verifier)
    return recorder


class RecordingScope:
    """One recorder, from installation to removal."""

    def __init__(self, runtime: Runtime, recorder: Recorder) -> None:
        self.runtime = runtime
        self.recorder = recorder
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._thread = threading.get_ident()
        self._is_mode_on = False
        self._ignore_dual_levels: Callable[[], None] | None = None

    @property
    def is_recording(self) -> bool:
        """Whether the recorder is installed."""
        return self._hooks is not None

    def open(self) -> None:
        """Install the recorder in this thread."""
        budget = self.recorder.strategy.memory_budget
        if budget is not None and self.recorder.strategy.watches_backward:
            self.runtime.backward.begin(budget)
            budget.on_write = self.recorder.memory.forget
        self.resume()

    def resume(self) -> None:
        """Install the recorder in this thread, again after `pause`."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self.recorder.pack, _unpack)
        hooks.__enter__()
        try:
            self._switch()
        except BaseException:
            hooks.__exit__()
            raise
        self._hooks = hooks
        self._ignore_dual_levels = on_dual_level(self._switch)
        self.runtime.open_scope(self.recorder)

    def _switch(self) -> None:
        """Switch recording off in a level of forward-mode AD, and on outside."""
        should_record = not in_dual_level()
        if self._thread != threading.get_ident() or self._is_mode_on is should_record:
            return
        self._is_mode_on = should_record
        if should_record:
            self.recorder.__enter__()  # type: ignore[no-untyped-call]
        else:
            exit_mode(self.recorder)
            self.recorder.memory.forget_all()  # writes are not recorded from here on (Rule 9)

    def pause(self) -> None:
        """Remove the recorder until `resume`."""
        assert self._hooks is not None
        assert self._ignore_dual_levels is not None
        self.recorder.hold_moved()
        self._hooks = None
        self._ignore_dual_levels()
        self.runtime.close_scope()
        if self._is_mode_on:
            exit_mode(self.recorder)
        self._is_mode_on = False
        exit_hooks(self.recorder.pack)

    def close(self) -> None:
        """Remove the recorder for good."""
        if self.is_recording:
            self.pause()
        self.recorder.close()
        budget = self.recorder.strategy.memory_budget
        if budget is not None:
            budget.on_write = None
            self.runtime.backward.end(budget)


def _unpack(handle: AnyHandle) -> Tensor:
    """Unpack a handle. Leave modes that would change the bits of the running gradient formula."""
    mode: Any = innermost_mode() if graph_task() != -1 else None
    watches = getattr(mode, "watches_backward", None)
    if watches is None:  # not a mode of lowtide
        return handle.unpack()
    if not watches:
        suspend_innermost_mode()
        return handle.unpack()
    return suspend_for_formula(mode.observer, handle.unpack())
