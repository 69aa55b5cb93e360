"""The strategy of a recorder: it decides how to treat each op and each saved tensor.

`rule`, `online`, `profile` and `planned` have one strategy each. For each op the recorder calls `before_op`,
`run_timed`, `decide`, `recorded` and `after_op`, in this order. For each tensor that autograd saves it calls `save`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...policies import Decision, Policy
from ..memory.budget import MemoryBudget
from ..ops.facts import OpFacts
from ..ops.timing import timed_call
from ..recording.recorded_op import RecordedOp
from ..values.handles import AnyHandle, Handle
from ..values.recipe import Recipe
from ..values.value import Tensor, Value

if TYPE_CHECKING:
    from ..recording.recorder import Recorder


class Strategy:
    """Base of all strategies, with the defaults. A strategy serves one recorder."""

    decision: Decision | None = None
    """The decision for the next op, if it is known before the op runs."""
    skipped_op: str | None = None
    """The name of the next op, if it need not be recorded because its values are kept."""
    times_ops = False
    """Whether the recorder runs ops by `run_timed`."""
    observes_ops = False
    """Whether the recorder calls `before_op` and `after_op`."""
    watches_backward = False
    """Whether the recorder stays active during a backward pass that starts inside its scope."""
    records_double_backward = False
    """Whether ops of a backward pass that creates a graph are recorded."""
    memory_budget: MemoryBudget | None = None
    recorder: Recorder

    def start(self, recorder: Recorder) -> None:
        """The recorder uses this strategy from now on."""
        self.recorder = recorder

    def nested(self, policy: Policy) -> Strategy:
        """Return the strategy for a `saving` scope inside this one."""
        raise NotImplementedError

    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called before each op. The result is passed to `after_op`."""

    def after_op(self, facts: OpFacts, out: Any, token: Any) -> None:
        """Called after each op."""

    def op_failed(self, token: Any) -> None:
        """Called instead of `after_op` if the op raises."""

    def run_timed(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """Run an op. Return its result and its cost in microseconds."""
        return timed_call(facts, args, kwargs)

    def decide(self, op: RecordedOp) -> Decision:
        """Decide whether the values of an op are kept or recomputed."""
        raise NotImplementedError

    def recorded(self, op: RecordedOp, recipe: Recipe | None) -> None:
        """An op has been recorded. `recipe` is None if its values are kept."""

    def skipped(self) -> None:
        """The op `skipped_op` has run without being recorded."""

    def take_over(self, value: Value, tensor: Tensor) -> bool:
        """Move a value that would be kept. Return False to keep it in memory."""
        return False

    def save(self, tensor: Tensor, storage: torch.UntypedStorage | None, value: Value | None) -> AnyHandle:
        """Return the handle for a tensor that autograd saves."""
        return self.recorder.handle(tensor, storage, value)

    def moved(self, handles: Sequence[Handle], value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Saved tensors are now parts of a newer `value`, which an op has made by writing another part of it."""
        self.recorder.hold_saved(value, tensor, storage)

    def backward_begins(self) -> None:
        """A backward pass through the step begins."""

    def backward_ended(self) -> None:
        """A backward pass through the step has ended without an error."""

    def root_called(self, root: torch.nn.Module) -> None:
        """A model is called for the first time in this scope."""
