"""Steps: the forward and backward passes that belong together.

A step begins with a call of a fitted model. It may contain several calls of several fitted models, and several backward
passes. It ends at the end of a backward pass when autograd holds no saved tensor that still waits for its first unpack.

Recording is on from the first call to the end of the step, except during backward passes that create no graph, and
while an optimizer updates parameters. So a loss outside the model belongs to the step.

Some saved tensors are never unpacked, for example those of an output that the loss does not use. Such a step is ended
by the next call of a model whose parameters have changed. If parameters do not change, the saved tensors of a call that
were freed unused show which ones to ignore after the next call.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..engine.memory.budget import MemoryBudget
from ..engine.recording.backward import BackwardMode, NodeSpan, spans_reached
from ..engine.recording.gradient_copies import copy_gradients
from ..engine.recording.recorder import Recorder
from ..engine.runtime import Runtime, current_runtime
from ..engine.scopes.recording_scope import RecordingScope
from ..engine.strategies.planned import PlannedStrategy
from ..engine.values.left_over import LeftOver
from ..torch_compat import (
    creates_graph,
    graph_task,
    in_dual_level,
    innermost_hooks,
    innermost_mode,
    next_node_number,
    retains_graph,
    wrap_backward,
)

_MAX_CALLS = 1_000
"""Calls in one step. More mean that graphs are collected and never used. Doubled: more memory is lost until then."""


Place = tuple[Any, int]
"""A saved tensor: the key of the call before it, and its number among the tensors saved since that call."""


class Fitted(Protocol):
    """A fitted model, as far as a step needs to know it."""

    def was_trained_since(self, versions: dict[int, int]) -> bool:
        """Return whether a parameter was written since the model had these versions."""


class _Call:
    """One call of a fitted model in a step."""

    __slots__ = ("first_save", "fitted", "key", "versions")

    def __init__(self, fitted: Fitted, key: Any, versions: dict[int, int], first_save: int) -> None:
        self.fitted = fitted
        self.key = key
        self.versions = versions
        self.first_save = first_save


class Step:
    """One step. Without a recorder it runs as plain PyTorch and is only counted."""

    def __init__(
        self,
        finish: Callable[[Step], None],
        recorder: Recorder | None = None,
        planned: PlannedStrategy | None = None,
        n_passes: int | None = None,
        unused: set[Place] | None = None,
    ) -> None:
        """Start a step. `finish` is called at its end.

        After `n_passes` backward passes it ends in any case. None: unknown. `unused` has the saved tensors that no
        earlier step unpacked. This step adds what it finds.
        """
        self.finish = finish
        self.recorder = recorder
        self.planned = planned
        self.calls: list[_Call] = []
        self.passes_done = 0
        self.is_trusted = True
        """Whether the step ended where it should, so that its profile is that of one step."""
        self._n_passes = n_passes
        self._unused = set() if unused is None else unused
        self._known_unused = frozenset(self._unused)
        budget: MemoryBudget | None = recorder.strategy.memory_budget if recorder is not None else None
        self.span = NodeSpan(budget)
        self.started_s = time.perf_counter()
        self._scope = RecordingScope(current_runtime(), recorder) if recorder is not None else None
        # Modes and hooks are removed in the order of a stack. If others are active, recording ends with the call.
        self.may_stay_open = innermost_mode() is None and innermost_hooks() is None
        if recorder is not None and self._scope is not None:
            recorder.tracks_saves = True
            self._scope.open()

    @property
    def is_recording(self) -> bool:
        """Whether the recorder is installed."""
        return self._scope is not None and self._scope.is_recording

    @property
    def covers_code_outside(self) -> bool:
        """Whether code outside of the fitted models belongs to the step now: it is recorded, or nothing needs to be."""
        return self.recorder is None or self.is_recording

    @property
    def follows_plan(self) -> bool:
        """Whether the step has followed a plan so far."""
        return self.planned is not None and self.planned.left_at is None

    def fitted(self) -> list[Fitted]:
        """Return the fitted models that were called, each once."""
        return list(dict.fromkeys(call.fitted for call in self.calls))

    def called(self, fitted: Fitted, key: Any, versions: dict[int, int]) -> None:
        """A fitted model is called. Calls that are alike have equal keys. `versions` are those of its parameters."""
        self.calls.append(_Call(fitted, key, versions, self._n_saves))

    @property
    def _n_saves(self) -> int:
        return self.recorder.context.saves.count if self.recorder is not None else 0

    # -- recording ------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Start recording again. Return whether it was off."""
        if self._scope is None or self._scope.is_recording:
            return False
        self._scope.resume()
        return True

    def pause(self) -> None:
        """Stop recording for a while."""
        if self._scope is not None and self._scope.is_recording:
            self._scope.pause()

    def close(self) -> None:
        """Stop recording for good."""
        if self.span.end is None:
            self.span.end = next_node_number()
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.close()

    def parameters_will_change(self, optimizer: Optimizer) -> None:
        """An optimizer is about to write the parameters. Its ops are not recorded."""
        if self.recorder is not None and self._scope is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.recorder.memory.forget_tensors(parameters)

    # -- backward -------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """A backward pass through the step begins."""
        if self.recorder is not None:
            self.recorder.memory.delete_unneeded_recipes()
            self.recorder.strategy.backward_begins()

    def backward_ended(self) -> None:
        """A backward pass through the step has ended."""
        self.passes_done += 1
        if self.recorder is not None:
            self.recorder.strategy.backward_ended()

    # -- the end --------------------------------------------------------------------------------------

    def is_over(self, retained: bool) -> bool:
        """Return whether the step ends with the backward pass that has just ended. It may have `retained` the graph."""
        if self._n_passes is not None and self.passes_done >= self._n_passes:
            return True
        if self.recorder is None:
            return self._n_passes is None
        saves = self.recorder.context.saves
        waiting = self._waiting()
        if not waiting:
            return not (retained and saves.alive())
        if retained:
            return False
        self._unused.update(self._place_of(number) for number in saves.freed_unused)
        places = {self._place_of(number) for number in waiting}
        if not places <= self._unused:
            return False
        self.is_trusted = places <= self._known_unused  # otherwise the step has the calls of at least two steps
        return True

    def is_stale(self) -> bool:
        """Return whether a call now begins another step, although this one has not ended with a backward pass."""
        if len(self.calls) >= _MAX_CALLS:
            self.is_trusted = False
            return True
        if self.recorder is None:
            return False
        if not self.passes_done:
            return not self.recorder.context.saves.waiting()  # its graph was freed without a backward pass
        return not self._waiting()

    def _waiting(self) -> list[int]:
        """Return the saved tensors that wait for a backward pass, without those of models that were trained since."""
        assert self.recorder is not None
        waiting = self.recorder.context.saves.waiting()
        if not waiting:
            return []
        trained = {id(call) for call in self.calls if call.fitted.was_trained_since(call.versions)}
        return [number for number in waiting if id(self._call_before(number)) not in trained]

    def _place_of(self, save: int) -> Place:
        call = self._call_before(save)
        return call.key, save - call.first_save

    def _call_before(self, save: int) -> _Call:
        return next((call for call in reversed(self.calls) if call.first_save <= save), self.calls[0])


class _ThreadState(threading.local):
    """The open step of a thread, and the running calls of fitted models: whether each belongs to the step."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.running: list[tuple[Fitted, bool]] = []
        self.optimizers = 0  # running calls of `Optimizer.step`


class FittingState:
    """The fitted models and open steps of one runtime."""

    def __init__(self) -> None:
        self.models: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self.hooks: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
        self.left_over = LeftOver()
        self._thread = _ThreadState()
        self._undo: list[Callable[[], None]] = []

    @property
    def step(self) -> Step | None:
        """The open step of this thread."""
        return self._thread.step

    @property
    def running(self) -> list[tuple[Fitted, bool]]:
        """The calls of fitted models that run in this thread, and whether each belongs to the open step."""
        return self._thread.running

    @property
    def is_optimizing(self) -> bool:
        """Whether an optimizer runs in this thread. It may call a model, as L-BFGS does."""
        return self._thread.optimizers > 0

    def begin(self, step: Step) -> None:
        """Make `step` the open step of this thread."""
        self._thread.step = step

    def abandon(self) -> None:
        """Close the open step of this thread, without counting it."""
        step, self._thread.step = self._thread.step, None
        if step is not None:
            step.close()

    def finish(self) -> None:
        """End the open step of this thread."""
        step, self._thread.step = self._thread.step, None
        if step is not None:
            step.finish(step)
            step.close()
            if step.recorder is not None and not step.follows_plan:
                self.left_over.add(step.recorder.context.saves)

    def install(self) -> None:
        """Listen to backward passes and optimizers."""
        if not self._undo:
            before = register_optimizer_step_pre_hook(self._before_optimizer)
            after = register_optimizer_step_post_hook(self._after_optimizer)
            self._undo = [wrap_backward(self._around_backward, outermost=True), before.remove, after.remove]

    def uninstall(self) -> None:
        """No model is fitted any more."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._thread.optimizers += 1
        step = self.step
        if step is not None and step.recorder is not None and not self.running and graph_task() == -1:
            step.parameters_will_change(optimizer)
            step.pause()

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._thread.optimizers = max(0, self._thread.optimizers - 1)
        step = self.step
        if step is not None and step.may_stay_open and graph_task() == -1:
            step.resume()

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            step = self.step
            if step is None and not self.models and not self.is_optimizing:
                self.uninstall()  # all fitted models were freed
            if step is None or graph_task() != -1:  # inside a backward pass that is handled already
                return original(roots, *args, **kwargs)
            creates_a_graph = creates_graph((roots, *args))
            was_recording = step.is_recording
            if not creates_a_graph:
                step.pause()
            if not spans_reached(roots, [step.span]):
                out = original(roots, *args, **kwargs)
            else:
                out = self._run_through(step, creates_a_graph, original, roots, *args, **kwargs)
                is_over = step.is_over(retained=creates_a_graph or retains_graph((roots, *args)))
                if is_over and not any(belongs for _, belongs in self.running):
                    self.finish()
            if self.step is step and was_recording:
                step.resume()
            return out

        return run

    def _run_through(
        self, step: Step, creates_a_graph: bool, original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a backward pass through the step."""
        try:
            with _measured(step, creates_a_graph), copy_gradients(roots, _oldest_copied(step, creates_a_graph)):
                step.backward_begins()
                out = original(roots, *args, **kwargs)
        except BaseException:
            self.abandon()  # the rest of the step is of no use
            raise
        step.backward_ended()
        return out


def fitting_state(runtime: Runtime | None = None) -> FittingState:
    """Return the fitted models and open steps of a runtime, by default the current one."""
    runtime = current_runtime() if runtime is None else runtime
    if runtime.fitting is None:
        runtime.fitting = FittingState()
    state: FittingState = runtime.fitting
    return state


def _measured(step: Step, creates_a_graph: bool) -> contextlib.AbstractContextManager[Any]:
    """Measure the peak of backward, if the step follows its plan and has a meter."""
    meter = step.planned.meter if step.planned is not None else None
    if meter is None or creates_a_graph or in_dual_level() or not step.follows_plan:
        return contextlib.nullcontext()
    return BackwardMode(meter)


def _oldest_copied(step: Step, creates_a_graph: bool) -> int | None:
    """Return the first autograd node of the step if its plan copies gradients."""
    if creates_a_graph or step.planned is None or not step.planned.copies_gradients:
        return None
    return step.span.first
