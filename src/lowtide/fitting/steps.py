"""Steps: from the call of a fitted model to the end of the backward pass through it.

Recording starts when the model is called. It continues until backward begins if no other mode or hook is active, so
that a loss outside the model belongs to the step.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..engine.memory.budget import MemoryBudget
from ..engine.recording.backward import BackwardMode, NodeSpan, spans_reached
from ..engine.recording.gradient_copies import copy_gradients
from ..engine.recording.recorder import Recorder
from ..engine.runtime import Runtime, current_runtime
from ..engine.scopes.recording_scope import RecordingScope
from ..engine.strategies.planned import PlannedStrategy
from ..torch_compat import creates_graph, innermost_hooks, innermost_mode, next_node_number, wrap_backward


class Step:
    """One step. Without a recorder it runs as plain PyTorch and is only counted."""

    def __init__(
        self,
        owner: object,
        finish: Callable[[Step], None],
        recorder: Recorder | None = None,
        planned: PlannedStrategy | None = None,
        bytes_before: int = 0,
    ) -> None:
        """Start a step. `finish` is called after its backward pass. `bytes_before` were alive before it."""
        self.owner = owner
        self.finish = finish
        self.recorder = recorder
        self.planned = planned
        self.bytes_before = bytes_before
        self.thread = threading.get_ident()
        budget: MemoryBudget | None = recorder.strategy.memory_budget if recorder is not None else None
        self.span = NodeSpan(budget)
        self.started_s = time.perf_counter()
        # Modes and hooks are removed in the order of a stack. If others are active, this scope cannot stay open.
        self.may_stay_open = innermost_mode() is None and innermost_hooks() is None
        self._scope = RecordingScope(current_runtime(), recorder) if recorder is not None else None
        if self._scope is not None:
            self._scope.open()

    @property
    def is_forward(self) -> bool:
        """Whether recording is on."""
        return self.span.end is None

    @property
    def is_needed(self) -> bool:
        """Whether a backward pass through it may still come."""
        return self.recorder is not None and self.recorder.context.has_handles()

    @property
    def follows_plan(self) -> bool:
        """Whether the step has followed a plan so far."""
        return self.planned is not None and self.planned.left_at is None

    def end_forward(self) -> None:
        """Stop recording."""
        if self.is_forward:
            self.span.end = next_node_number()
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()


class FittingState:
    """The fitted models and open steps of one runtime."""

    def __init__(self) -> None:
        self.models: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self.hooks: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self._open_steps: list[Step] = []  # in the order in which they began
        self._unwrap: Callable[[], None] | None = None

    def add(self, step: Step) -> None:
        """Add a step whose backward pass has not ended."""
        self._open_steps.append(step)

    def remove(self, step: Step) -> bool:
        """Remove a step. Return whether it was open."""
        if step not in self._open_steps:
            return False
        self._open_steps.remove(step)
        return True

    def steps_of(self, owner: object) -> list[Step]:
        """Return the open steps of a fitted model."""
        return [step for step in self._open_steps if step.owner is owner]

    def steps_of_thread(self) -> list[Step]:
        """Return the open steps of this thread."""
        return [step for step in self._open_steps if step.thread == threading.get_ident()]

    def wrap_backward(self) -> None:
        """End steps with the backward pass through them."""
        if self._unwrap is None:
            self._unwrap = wrap_backward(self._around_backward, outermost=True)

    def unwrap_backward(self) -> None:
        """No model is fitted any more."""
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            mine = self.steps_of_thread()
            for step in mine:
                step.end_forward()
            passed = spans_reached(roots, [s.span for s in mine]) if mine else set()
            through = [s for s in mine if s.span in passed]
            creates_a_graph = creates_graph((roots, *args))
            try:
                with (
                    _measured(through, creates_a_graph),
                    copy_gradients(roots, _oldest_copied(through, creates_a_graph)),
                ):
                    for step in through:
                        if step.planned is not None:
                            step.planned.backward_begins()
                    out = original(roots, *args, **kwargs)
            except BaseException:
                for step in through:  # the rest of the step is of no use
                    self.remove(step)
                raise
            for step in through:
                if self.remove(step):
                    step.finish(step)
            return out

        return run


def fitting_state(runtime: Runtime | None = None) -> FittingState:
    """Return the fitted models and open steps of a runtime, by default the current one."""
    runtime = current_runtime() if runtime is None else runtime
    if runtime.fitting is None:
        runtime.fitting = FittingState()
    state: FittingState = runtime.fitting
    return state


def is_in_forward() -> bool:
    """Return whether the code of this thread runs inside the forward pass of a step."""
    return any(step.is_forward for step in fitting_state().steps_of_thread())


def _measured(through: list[Step], creates_a_graph: bool) -> contextlib.AbstractContextManager[Any]:
    """Measure the peak of backward, if all steps follow their plans and one of them has a meter."""
    recorded = [step for step in through if step.recorder is not None]
    meter = next((s.planned.meter for s in recorded if s.planned is not None and s.planned.meter is not None), None)
    if meter is None or creates_a_graph or not all(step.follows_plan for step in recorded):
        return contextlib.nullcontext()
    return BackwardMode(meter)


def _oldest_copied(through: list[Step], creates_a_graph: bool) -> int | None:
    """Return the first autograd node of the steps whose plans copy gradients."""
    if creates_a_graph:
        return None
    copying = [step for step in through if step.planned is not None and step.planned.copies_gradients]
    return min((step.span.first for step in copying), default=None)
