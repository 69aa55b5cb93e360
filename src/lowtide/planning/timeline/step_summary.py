"""Text and totals for plans of timelines: the place of the peak, its largest holders, bytes and time by module."""

from __future__ import annotations

from collections import Counter

from ..._units import format_bytes
from ...records import Op, Unpack
from ...records.plan import ModuleSummary
from ..summary import module_pattern
from .decisions import KEPT
from .step_candidate import StepCandidate
from .step_facts import StepFacts
from .step_simulator import StepSimulator


def describe_event(facts: StepFacts, event: int) -> str:
    """Return such as "in forward, at aten.mm.default of h.3.mlp"."""
    trace = facts.trace
    if not trace.events:
        return "nowhere"
    record = trace.events[event]
    if isinstance(record, Op):
        where = "in forward" if record.backward is None else _pass_name(facts, record.backward)
        return f"{where}, at {_op_name(record)}"
    where = _pass_name(facts, record.backward)
    value = facts.unpack_value[event]
    if value < 0:  # a source, such as a parameter: name the nearest unpack of a value that has a producer
        near = [t for t in trace.unpack_events if facts.unpack_value[t] >= 0]
        if not near:
            return f"{where}, when it unpacks a tensor from outside the step"
        value = facts.unpack_value[min(near, key=lambda t: abs(t - event))]
    return f"{where}, when it unpacks the output of {_op_name(trace.ops[facts.producer[value]])}"


def _pass_name(facts: StepFacts, backward: int) -> str:
    passes = {event.backward for event in facts.trace.events if isinstance(event, Unpack)}
    return "in backward" if len(passes) < 2 else f"in backward pass {backward + 1} of {len(passes)}"


def _op_name(op: Op) -> str:
    return op.name + (f" of {op.module}" if op.module else "")


def describe_step_holders(plan: StepCandidate, count: int = 5) -> list[str]:
    """Return the largest holders at the peak, such as "12 × aten.mm.default of h.*.mlp (float32): 1.00 GiB"."""
    facts = plan.table.facts
    nbytes: Counter[str] = Counter()
    values: Counter[str] = Counter()
    for v in StepSimulator(plan.table).holders(plan.decisions, plan.simulation.peak_at):
        op, dtype = facts.trace.ops[facts.producer[v]], facts.trace.values[v].dtype
        name = op.name + (f" of {module_pattern(op.module)}" if op.module else "") + (f" ({dtype})" if dtype else "")
        nbytes[name] += facts.nbytes[v]
        values[name] += 1
    return [f"{values[name]} × {name}: {format_bytes(size)}" for name, size in nbytes.most_common(count)]


def summarise_step_modules(plan: StepCandidate) -> tuple[ModuleSummary, ...]:
    """Return bytes and times by module pattern. Values that are held for a part of the step count as recomputed."""
    facts = plan.table.facts
    patterns = [module_pattern(op.module) for op in facts.trace.ops]
    ops = Counter(patterns)
    kept: Counter[str] = Counter()
    recomputed: Counter[str] = Counter()
    replay_s: dict[str, float] = dict.fromkeys(ops, 0.0)
    for v in kept_values(plan):
        kept[patterns[facts.producer[v]]] += facts.nbytes[v]
    for j, decision in enumerate(plan.decisions):
        if decision != KEPT:
            recomputed[patterns[j]] += sum(facts.nbytes[v] for v in facts.outputs[j] if facts.handles[v])
            replay_s[patterns[j]] += facts.replay_s[j] * plan.simulation.replays[j]
    return tuple(
        ModuleSummary(pattern, ops[pattern], kept[pattern], recomputed[pattern], replay_s[pattern]) for pattern in ops
    )


def kept_values(plan: StepCandidate) -> list[int]:
    """Return the values of kept ops that a handle or a recipe uses."""
    facts, decisions = plan.table.facts, plan.decisions
    return [
        v
        for v in range(facts.n_values)
        if facts.producer[v] >= 0
        and decisions[facts.producer[v]] == KEPT
        and (facts.handles[v] or any(decisions[w] != KEPT for w in facts.consumers[v]))
    ]
