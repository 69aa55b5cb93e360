"""Decisions and simulations in words: where the peak is, who holds it, what each kind of module does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from .._units import format_bytes
from ..records.plan import ModuleSummary, PinnedOp
from .candidate import Candidate
from .problem import Problem
from .simulator import PeakAt, Simulator

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def describe_place(problem: Problem, at: PeakAt) -> str:
    """ "in forward, at aten.mm.default of h.3.mlp" """
    trace = problem.trace
    if at.phase == "forward":
        return f"in forward, at {_op_name(problem, at.index)}" if trace.ops else "nowhere"
    producer = problem.producer[problem.unpack_value[at.index]]
    if producer < 0:
        # Backward asks for a parameter: name the op whose value it asks for next to it.
        near = [k for k in range(problem.n_unpacks) if problem.producer[problem.unpack_value[k]] >= 0]
        if not near:
            return f"in backward, at ask {at.index}"
        producer = problem.producer[problem.unpack_value[min(near, key=lambda k: abs(k - at.index))]]
    return f"in backward, when it needs what {_op_name(problem, producer)} made"


def describe_holders(simulator: Simulator, candidate: Candidate, count: int = 5) -> list[str]:
    """The largest holders of memory at the peak, alike ones together: "12 × aten.mm.default of h.*.mlp: 1.00 GiB"."""
    problem = simulator.problem
    sizes: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    simulation = candidate.simulation
    holders = simulator.holders(
        candidate.keep,
        candidate.released,
        simulation.peak_at,
        simulation.written_before,
        simulation.prefetch_after,
    )
    for v in holders:
        op = problem.trace.ops[problem.producer[v]]
        where = f" of {module_pattern(op.module)}" if op.module else ""
        sizes[op.name + where] += problem.nbytes[v]
        numbers[op.name + where] += 1
    return [f"{numbers[name]} × {name}: {format_bytes(size)}" for name, size in sizes.most_common(count)]


def module_pattern(module: str) -> str:
    """A module path with its numbers taken out: "h.3.mlp" is a "h.*.mlp"."""
    return _NUMBER.sub("*", module)


def summarise_modules(simulator: Simulator, candidate: Candidate) -> tuple[ModuleSummary, ...]:
    """Bytes and times by kind of module."""
    problem = simulator.problem
    kinds = [module_pattern(op.module) for op in problem.trace.ops]
    ops = Counter(kinds)
    kept: Counter[str] = Counter()
    recomputed: Counter[str] = Counter()
    seconds: dict[str, float] = dict.fromkeys(ops, 0.0)
    offloaded: Counter[str] = Counter()
    packed: Counter[str] = Counter()
    for v in simulator.held_into_backward(candidate.keep, candidate.offload):
        kept[kinds[problem.producer[v]]] += problem.nbytes[v]
    for v in simulator.held_outside(candidate.keep, candidate.offload):
        elsewhere = packed if problem.codec_cost[v] is not None else offloaded
        elsewhere[kinds[problem.producer[v]]] += problem.nbytes[v]
    for j in range(problem.n_ops):
        if not candidate.keep[j]:
            recomputed[kinds[j]] += sum(problem.nbytes[v] for v in problem.outputs[j] if problem.saved[v])
            seconds[kinds[j]] += problem.replay_overhead_s[j] * candidate.simulation.replays[j]
    return tuple(
        ModuleSummary(kind, ops[kind], kept[kind], recomputed[kind], seconds[kind], offloaded[kind], packed[kind])
        for kind in ops
    )


def summarise_pinned(problem: Problem) -> tuple[PinnedOp, ...]:
    """The pinned ops, alike ones together."""
    pinned: Iterable[tuple[str, str, str]] = (
        (op.name, module_pattern(op.module), op.pinned) for op in problem.trace.ops if op.pinned is not None
    )
    return tuple(PinnedOp(name, module, why, count) for (name, module, why), count in Counter(pinned).items())


def _op_name(problem: Problem, op: int) -> str:
    record = problem.trace.ops[op]
    return record.name + (f" of {record.module}" if record.module else "")
