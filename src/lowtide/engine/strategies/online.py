"""The online strategy: keep everything until memory is short, then evict.

Every value that autograd saves is held and can be evicted. Values without a recipe (Rules 9 and 12) are kept, or moved
if there is a store or codec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._units import format_bytes
from ...policies import Decision, OpInfo, Policy
from ..memory.budget import MemoryBudget
from ..ops.facts import OpFacts
from ..recording.recorded_op import RecordedOp
from ..values.handles import AnyHandle, Handle
from ..values.value import Tensor, Value
from ..values.view import Ref
from .base import Strategy
from .rule import RuleStrategy


@dataclass(frozen=True)
class WithinBudget(Policy):
    """Record how to recompute every value. The memory budget decides what is evicted."""

    budget_bytes: int
    constant_decision = Decision.RECOMPUTE
    needs_cost = True

    def decide(self, op: OpInfo) -> Decision:
        """Return `RECOMPUTE`: the value can be evicted."""
        return Decision.RECOMPUTE

    def __repr__(self) -> str:
        return f"budget({format_bytes(self.budget_bytes)})"


class OnlineStrategy(Strategy):
    """Makes room before every op, in forward and backward."""

    decision = Decision.RECOMPUTE
    times_ops = True
    observes_ops = True
    watches_backward = True
    records_double_backward = True
    memory_budget: MemoryBudget

    def __init__(self, memory_budget: MemoryBudget, rule: RuleStrategy | None = None) -> None:
        """Evict within `memory_budget`. Inside a nested `saving` scope, `rule` decides instead."""
        self.memory_budget = memory_budget
        self._rule = rule
        self._token: Any = None  # of the op that runs
        if rule is not None:
            self.decision = rule.decision  # type: ignore[assignment]
            self.times_ops = rule.times_ops

    def nested(self, policy: Policy) -> OnlineStrategy:
        """Return a strategy that decides by the policy and stays within the budget."""
        return OnlineStrategy(self.memory_budget, RuleStrategy(policy))

    def start(self, recorder: Any) -> None:
        """The recorder uses this strategy from now on."""
        super().start(recorder)
        recorder.context.on_replayed = recorder.memory.replayed
        if self._rule is not None:
            self._rule.start(recorder)

    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make room for the results of an op."""
        self._token = None if facts.views else self.memory_budget.before(facts, args, kwargs)
        return self._token

    def run_timed(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """Run an op. Measure its workspace if it is not known."""
        return self.measured(lambda: super(OnlineStrategy, self).run_timed(facts, args, kwargs))

    def measured(self, run: Callable[[], tuple[Any, float]]) -> tuple[Any, float]:
        """Run an op after `before_op`. Measure its workspace if it is not known."""
        return self.memory_budget.call(run, self._token)

    def after_op(self, facts: OpFacts, out: Any, token: Any) -> None:
        """Count the results of an op."""
        self.memory_budget.after(out, token)

    def decide(self, op: RecordedOp) -> Decision:
        """Record a recipe, unless a nested rule keeps the value."""
        return Decision.RECOMPUTE if self._rule is None else self._rule.decide(op)

    def save(self, tensor: Tensor, storage: torch.UntypedStorage | None, value: Value | None) -> AnyHandle:
        """Hold a value until it is evicted."""
        recorder = self.recorder
        if value is None or storage is None or not self._may_evict(value):
            return recorder.handle(tensor, storage, value)
        self._hold(value, tensor, storage)
        value.refer()
        return Handle(Ref(value, tensor), recorder.context)

    def moved(self, handles: Sequence[Handle], value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Hold a newer value until it is evicted."""
        if self._may_evict(value):
            self._hold(value, tensor, storage)
        else:
            super().moved(handles, value, tensor, storage)

    def _may_evict(self, value: Value) -> bool:
        if value.blank or self._rule is not None:
            return False
        return value.recipe is not None or (value.origin is not None and self.memory_budget.can_move)

    def _hold(self, value: Value, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        recorder = self.recorder
        if not value.counted:
            recorder.context.counts.saved_evictable(value)
        if value.tensor is None:
            recorder.hold_evictable(value, tensor, storage)
        self.memory_budget.admit(value)

    def root_called(self, root: torch.nn.Module) -> None:
        """Count the parameters of a model."""
        self.memory_budget.ledger.count_module(root)
