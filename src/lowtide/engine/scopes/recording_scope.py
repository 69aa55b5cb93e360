"""A recording scope: installs a recorder and its saved-tensor hooks, and removes them again."""

from __future__ import annotations

from typing import Any

import torch

from ...policies import Policy
from ...torch_compat import exit_hooks, exit_mode, graph_task, innermost_mode, suspend_innermost_mode
from ..memory.budget import MemoryBudget
from ..recording.backward import suspend_for_formula
from ..recording.module_tracker import ModuleTracker
from ..recording.recorder import Recorder
from ..recording.verifier import Verifier
from ..runtime import Runtime
from ..strategies.base import Strategy
from ..values.handles import Handle, Kept
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
    recorder = Recorder(strategy, context, tracker, Verifier(context, memory_budget) if verify else None)
    return recorder


class RecordingScope:
    """One recorder, from installation to removal."""

    def __init__(self, runtime: Runtime, recorder: Recorder) -> None:
        self.runtime = runtime
        self.recorder = recorder
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def open(self) -> None:
        """Install the recorder in this thread."""
        budget = self.recorder.strategy.memory_budget
        if budget is not None and self.recorder.strategy.watches_backward:
            self.runtime.backward.begin(budget)
        hooks = torch.autograd.graph.saved_tensors_hooks(self.recorder.pack, _unpack)
        hooks.__enter__()
        try:
            self.recorder.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            hooks.__exit__()
            raise
        self._hooks = hooks
        self.runtime.open_scope(self.recorder)

    def close(self) -> None:
        """Remove the recorder."""
        assert self._hooks is not None
        self._hooks = None
        self.runtime.close_scope()
        exit_mode(self.recorder)
        exit_hooks(self.recorder.pack)
        self.recorder.close()
        budget = self.recorder.strategy.memory_budget
        if budget is not None:
            self.runtime.backward.end(budget)


def _unpack(handle: Handle | Kept) -> Tensor:
    """Unpack a handle. Leave modes that would change the bits of the running gradient formula."""
    mode: Any = innermost_mode() if graph_task() != -1 else None
    watches = getattr(mode, "watches_backward", None)
    if watches is None:  # not a mode of lowtide
        return handle.unpack()
    if not watches:
        suspend_innermost_mode()
        return handle.unpack()
    tensor = handle.unpack()
    suspend_for_formula(mode.observer, tensor)
    return tensor
