"""The profile strategy: an online step that also records everything a planner needs (a `Trace`).

The step is an ordinary one: exact and within its budget.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import records
from ...policies import Decision, Policy
from ...torch_compat import graph_task, new_alias
from ..memory.budget import MemoryBudget
from ..ops.facts import OpFacts
from ..ops.timing import timed
from ..recording.recorded_op import RecordedOp
from ..values.handles import AnyHandle, Handle
from ..values.recipe import Recipe
from ..values.value import Tensor, Value
from ..values.view import Ref
from .base import Strategy
from .online import OnlineStrategy
from .step_profile import StepProfile


class ProfileObserver:
    """Tells a profile what a memory budget does."""

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        self._unpack_started_s = 0.0
        self._is_unpacking = False

    def op_ran(self, live_bytes: int) -> None:
        """Record the live bytes, unless the op is part of a replay: its result is not a known value yet."""
        if not self._is_unpacking:
            self.profile.moment(live_bytes)

    def formula_begins(self, live_bytes: int) -> Callable[[int], None]:
        """Return a function that records how many bytes the formula needed."""
        return self.profile.formula_begins(live_bytes)

    def backward_op_watched(self, seconds: float) -> None:
        """Subtract the time of the budget from backward."""
        self.profile.watched(seconds)

    def gradient_copied(self, part: Tensor) -> Callable[[float], None]:
        """Record the effect of a gradient copy."""
        return self.profile.copies(part)

    def value_held(self, tensor: Tensor) -> None:
        """Count memory that the engine holds for a value as the trace's own."""
        self.profile.held(tensor)

    def unpack_begins(self) -> None:
        """Start the clock of an unpack."""
        self._unpack_started_s = time.perf_counter()
        self._is_unpacking = True

    def unpack_ends(self, value: Value, save: int, live_bytes: int) -> None:
        """Record an unpack."""
        self._is_unpacking = False
        self.profile.unpacked(value, save, self._unpack_started_s, live_bytes)


class ProfileStrategy(Strategy):
    """An online strategy that records a profile."""

    times_ops = True
    observes_ops = True
    watches_backward = True
    records_double_backward = True
    memory_budget: MemoryBudget

    def __init__(self, online: OnlineStrategy, profile: StepProfile) -> None:
        self._online = online
        self.profile = profile
        self.memory_budget = online.memory_budget
        self.decision = online.decision

    def start(self, recorder: Any) -> None:
        """The recorder uses this strategy from now on."""
        super().start(recorder)
        self._online.start(recorder)
        recorder.context.observer = self.profile
        recorder.context.on_replayed = recorder.memory.replayed

    def nested(self, policy: Policy) -> Strategy:
        """Return a strategy that decides by the policy and records into the same profile."""
        return ProfileStrategy(self._online.nested(policy), self.profile)

    def trace(self, device: str) -> records.Trace:
        """Return the recorded step."""
        return self.profile.trace(self.memory_budget.peak_bytes, device)

    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stop the clock of the user's code, and make room."""
        if self._is_recording():
            self.profile.pause()
        return self._online.before_op(facts, args, kwargs)

    def after_op(self, facts: OpFacts, out: Any, token: Any) -> None:
        """Count the results, and start the clock of the user's code."""
        self._online.after_op(facts, out, token)
        if self._is_recording():
            self.profile.returned(out)
            self.profile.resume()

    def run_timed(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """Run an op. Every call is timed, not only the first ones of a signature."""
        return self._online.measured(lambda: timed(facts, args, kwargs))

    def decide(self, op: RecordedOp) -> Decision:
        """Decide as the online strategy does."""
        return self._online.decide(op)

    def recorded(self, op: RecordedOp, recipe: Recipe | None) -> None:
        """Add an op to the profile."""
        cost_us, replay_us = op.cost_us, None
        verifier = self.recorder.verifier
        if recipe is not None and verifier is not None and math.isfinite(verifier.replay_us):
            if recipe.origin.facts is op.facts:
                # Verification of the previous op has emptied the caches; the replay came right after the op.
                cost_us = min(cost_us, verifier.replay_us)
            else:
                replay_us = verifier.replay_us
        made, written = self.recorder.memory.made_by(op)
        pinned = op.facts.pinned
        if recipe is None or any(v.recipe is None for v in [*(v for v, _ in made), *(v for _, v in written)]):
            recipe = None
            pinned = pinned or "its values cannot be recomputed"
        self.profile.op(
            op, recipe, made, written, pinned, cost_us, replay_us, workspace_bytes=self.memory_budget.workspace_bytes
        )

    def save(self, tensor: Tensor, storage: torch.UntypedStorage | None, value: Value | None) -> AnyHandle:
        """Return a handle, also for values that cannot be recomputed: their unpacks are recorded too."""
        self.profile.pause()
        handle = self._handle(tensor, storage, value)
        if value is not None and value.origin is not None:
            self.profile.handle_made(value, handle, self.recorder.context.saves.count - 1)
        self.profile.resume()
        return handle

    def _handle(self, tensor: Tensor, storage: torch.UntypedStorage | None, value: Value | None) -> AnyHandle:
        recorder = self.recorder
        if value is None or storage is None or value.origin is None:
            return self._online.save(tensor, storage, value)
        self.profile.saved_value(value)
        alias = None
        if value.tensor is None and type(tensor) is Tensor:
            # Hold another tensor object than user code has, to see when user code frees its own.
            alias = new_alias(tensor)
            value.alias = weakref.ref(alias)
        if value.recipe is not None and not value.blank:
            return self._online.save(tensor, storage, value)
        if value.tensor is None:
            recorder.hold(value, tensor, storage)
        if not value.counted:
            recorder.context.counts.saved(value)
        value.refer()
        return Handle(Ref(value, tensor), recorder.context)

    def moved(self, handles: Sequence[Handle], value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Record that handles refer to a newer value."""
        self.profile.handles_moved(handles, value)
        if value.recipe is not None and not value.blank:
            self._online.moved(handles, value, tensor, storage)
        else:
            super().moved(handles, value, tensor, storage)

    def backward_begins(self) -> None:
        """Add a backward pass to the profile."""
        self.profile.backward_begins(self.recorder.context.saves.count)

    def backward_ended(self) -> None:
        """Stop the clock of backward."""
        self.profile.backward_ended()

    def root_called(self, root: torch.nn.Module) -> None:
        """Count the parameters of a model."""
        self._online.root_called(root)

    def _is_recording(self) -> bool:
        """Return whether ops are recorded now: not those of replays, nor of a backward pass that creates no graph."""
        return not self.recorder.context.is_replaying and (graph_task() == -1 or torch.is_grad_enabled())
