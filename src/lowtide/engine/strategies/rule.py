"""The rule strategy: a policy decides for each op."""

from __future__ import annotations

from ...policies import ByCallable, Decision, OpInfo, Policy, wrong_decision
from ..recording.inplace import tensors_of
from ..recording.recorded_op import RecordedOp
from ..values.value import Location
from .base import Strategy

_new_tuple = tuple.__new__  # builds an OpInfo from its fields in a fifth of the time that keywords take


class RuleStrategy(Strategy):
    """Decides by a policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.decision = policy.constant_decision
        self.times_ops = policy.needs_cost
        self._decide = policy.function if type(policy) is ByCallable else policy.decide
        # Decisions by op name and location, for policies that depend on nothing else.
        is_cacheable = policy.cacheable and not policy.needs_cost
        self._known: dict[tuple[str, Location], Decision] | None = {} if is_cacheable else None

    def nested(self, policy: Policy) -> Strategy:
        """Return the strategy for the inner policy."""
        return RuleStrategy(policy)

    def decide(self, op: RecordedOp) -> Decision:
        """Return the decision of the policy, from the cache if possible."""
        decision = self.decision
        if decision is not None:
            return decision
        if self.policy.needs_cost:
            return self._checked(self._decide_by_cost(op), op)
        known, key = self._known, (op.facts.name, op.location)
        if known is not None:
            decision = known.get(key)
        if decision is None:
            facts = op.facts
            path, layer, _, outside_layers = op.location
            fields = (
                op.number, facts.name, path, layer, outside_layers, op.bytes_made, 0.0, 0.0, facts.func, op.args,
                op.kwargs
            )  # fmt: skip
            decision = self._checked(self._decide(_new_tuple(OpInfo, fields)), op)
            if known is not None:
                known[key] = decision
        return decision

    def _decide_by_cost(self, op: RecordedOp) -> Decision:
        """Return the decision of a policy that needs costs. A cost includes all ops that would be replayed first."""
        facts = op.facts
        path, layer, _, outside_layers = op.location
        info = OpInfo(
            op.number, facts.name, path, layer, outside_layers, op.bytes_made, op.cost_us, 0.0, facts.func, op.args,
            op.kwargs
        )  # fmt: skip
        own_us = self.policy.own_cost_us(info, op.cost_us)
        op.recompute_us = own_us + self.recorder.memory.recompute_us(tensors_of(op.args, op.kwargs))
        return self._decide(info._replace(cost_us=own_us, recompute_us=op.recompute_us))

    def _checked(self, decision: Decision, op: RecordedOp) -> Decision:
        if decision is not Decision.KEEP and decision is not Decision.RECOMPUTE:
            raise wrong_decision(self.policy, decision, op.facts.name)
        return decision
