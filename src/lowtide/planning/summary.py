"""Text and totals for plans: the place of the peak, bytes and time by module pattern."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from ..records import Trace
from ..records.plan import ModuleSummary, PinnedOp
from .candidate import Candidate
from .problem import Problem
from .simulator import PeakAt, Simulator

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def describe_place(problem: Problem, at: PeakAt) -> str:
    """Return such as "in forward, at aten.mm.default of h.3.mlp"."""
    trace = problem.trace
    if at.phase == "forward":
        return f"in forward, at {_op_name(problem, at.index)}" if trace.ops else "nowhere"
    producer = problem.producer[problem.unpack_value[at.index]]
    if producer < 0:
        # Backward unpacks a source, such as a parameter: name the nearest unpack of a value that has a producer.
        near = [k for k in range(problem.n_unpacks) if problem.producer[problem.unpack_value[k]] >= 0]
        if not near:
            return f"in backward, at unpack {at.index}"
        producer = problem.producer[problem.unpack_value[min(near, key=lambda k: abs(k - at.index))]]
    return f"in backward, when it unpacks the output of {_op_name(problem, producer)}"


def module_pattern(module: str) -> str:
    """Return a module path with `*` for its numbers: "h.*.mlp" for "h.3.mlp"."""
    return _NUMBER.sub("*", module)


def summarise_modules(simulator: Simulator, candidate: Candidate) -> tuple[ModuleSummary, ...]:
    """Return bytes and times by module pattern."""
    problem = simulator.problem
    patterns = [module_pattern(op.module) for op in problem.trace.ops]
    ops = Counter(patterns)
    kept: Counter[str] = Counter()
    recomputed: Counter[str] = Counter()
    replay_s: dict[str, float] = dict.fromkeys(ops, 0.0)
    stored: Counter[str] = Counter()
    compressed: Counter[str] = Counter()
    for v in simulator.held_into_backward(candidate.keep, candidate.offload):
        kept[patterns[problem.producer[v]]] += problem.nbytes[v]
    for v in simulator.offloaded_into_backward(candidate.keep, candidate.offload):
        counter = compressed if problem.codec_cost[v] is not None else stored
        counter[patterns[problem.producer[v]]] += problem.nbytes[v]
    for j in range(problem.n_ops):
        if not candidate.keep[j]:
            recomputed[patterns[j]] += sum(problem.nbytes[v] for v in problem.outputs[j] if problem.saved[v])
            replay_s[patterns[j]] += problem.replay_s[j] * candidate.simulation.replays[j]
    return tuple(
        ModuleSummary(
            pattern,
            ops[pattern],
            kept[pattern],
            recomputed[pattern],
            replay_s[pattern],
            stored[pattern],
            compressed[pattern],
        )
        for pattern in ops
    )


def summarise_pinned(trace: Trace) -> tuple[PinnedOp, ...]:
    """Return the pinned ops, counted by name, module pattern and reason."""
    pinned: Iterable[tuple[str, str, str]] = (
        (op.name, module_pattern(op.module), op.pinned) for op in trace.ops if op.pinned is not None
    )
    return tuple(PinnedOp(name, module, why, count) for (name, module, why), count in Counter(pinned).items())


def _op_name(problem: Problem, op: int) -> str:
    record = problem.trace.ops[op]
    return record.name + (f" of {record.module}" if record.module else "")
