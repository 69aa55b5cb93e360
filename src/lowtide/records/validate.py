"""Checks of a trace: the facts that planning relies on.

Indices exist, an op comes after the ops whose values it reads, each value is made once, and unpacks are of saved values
and grouped by node. Backward passes are numbered in the order in which they start. If ops run after the first unpack,
or there are several backward passes, every unpack has the number of its saved tensor and a handle of its value is
alive. Of measured times and bytes only the sign is checked. `other_bytes` is a difference of measurements and may be
slightly negative.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import NoReturn

from .._errors import ArgumentError
from .trace import TRACE_VERSION, Op, Trace


def check_trace(trace: Trace) -> None:
    """Raise `ArgumentError` at the first contradiction."""
    if trace.version != TRACE_VERSION:
        _refuse(f"it has version {trace.version}, and this lowtide reads version {TRACE_VERSION}: profile again")
    _check_time("the step", trace.step_s)
    _check_time("a replay", trace.replay_overhead_s)
    _check_time("copying gradients", trace.copying_s)
    _check_values(trace)
    for number, (index, op) in enumerate(zip(trace.op_events, trace.ops, strict=True)):
        _check_op(trace, op, f"op {number} ({op.name})", index)
    _check_unpacks(trace)
    _check_passes(trace)
    _check_handles(trace)
    for effect in trace.copies:
        if not 0 <= effect.unpack < len(trace.unpacks):
            _refuse(f"gradient copies change unpack {effect.unpack} of {len(trace.unpacks)}")
        if trace.unpacks[effect.unpack].rise_bytes + effect.more_rise_bytes < 0:
            _refuse(f"without gradient copies, unpack {effect.unpack} allocates a negative number of bytes")


def _check_values(trace: Trace) -> None:
    n_events = len(trace.events)
    for index, value in enumerate(trace.values):
        if value.nbytes < 0:
            _refuse(f"value {index} has {value.nbytes} bytes")
        if value.made_at is not None:
            maker = trace.events[value.made_at] if 0 <= value.made_at < n_events else None
            if not isinstance(maker, Op):
                _refuse(f"value {index} is made at event {value.made_at}, which is not an op")
            if not value.made_at <= value.held_until <= n_events:
                _refuse(
                    f"value {index} is made at event {value.made_at} and held until event {value.held_until} "
                    f"of {n_events}"
                )
            if index not in maker.outputs:
                _refuse(f"value {index} is not an output of the op at event {value.made_at}")


def _check_op(trace: Trace, op: Op, label: str, index: int) -> None:
    values = trace.values
    _check_numbers(trace, op, label, index)
    for v in (*op.inputs, *op.outputs):
        if not 0 <= v < len(values):
            _refuse(f"{label} refers to value {v} of {len(values)}")
    if len(set(op.inputs)) < len(op.inputs) or len(set(op.outputs)) < len(op.outputs):
        _refuse(f"{label} names a value twice")
    for v in op.inputs:
        made_at = values[v].made_at
        if made_at is not None and made_at >= index:
            _refuse(f"{label} reads value {v}, which is made later, at event {made_at}")
    for v in op.outputs:
        if values[v].made_at != index:
            _refuse(f"{label} has output {v}, which is made at event {values[v].made_at}")
    for write in op.writes:
        if write.new not in op.outputs or (write.old is not None and write.old not in op.inputs):
            _refuse(f"{label} overwrites {write.old} with {write.new}: not an input and an output of the op")
        if write.old is not None and values[write.old].storage != values[write.new].storage:
            _refuse(f"{label} overwrites {write.old} with {write.new}, which have different storages")


def _check_numbers(trace: Trace, op: Op, label: str, index: int) -> None:
    _check_time(label, op.time_s)
    _check_time(f"a replay of {label}", op.replay_s or 0.0)
    if op.workspace_bytes < 0:
        _refuse(f"{label} has a workspace of {op.workspace_bytes} bytes")
    if op.reads_until is not None and not index < op.reads_until < len(trace.events):
        _refuse(f"{label} at event {index} reads memory that is overwritten at event {op.reads_until}")


def _check_unpacks(trace: Trace) -> None:
    saved = set(trace.saved)
    if len(saved) < len(trace.saved):
        _refuse("a value is saved twice")
    for v in saved:
        if not 0 <= v < len(trace.values):
            _refuse(f"value {v} of {len(trace.values)} is saved")
    for k, unpack in enumerate(trace.unpacks):
        if unpack.value not in saved:
            _refuse(f"unpack {k} is of value {unpack.value}, which was not saved")
        _check_time(f"unpack {k}", unpack.time_s)
        if unpack.rise_bytes < 0:
            _refuse(f"unpack {k} allocates {unpack.rise_bytes} bytes")
    by_pass = sorted(trace.unpacks, key=lambda unpack: unpack.backward)  # passes may be nested
    nodes = [node for node, _ in itertools.groupby((unpack.backward, unpack.node) for unpack in by_pass)]
    for (_, node), runs in Counter(nodes).items():
        if runs > 1:
            _refuse(f"the unpacks of node {node} do not follow each other")


def _check_passes(trace: Trace) -> None:
    numbers = dict.fromkeys(event.backward for event in trace.events if event.backward is not None)
    if list(numbers) != sorted(numbers) or min(numbers, default=0) < 0:
        _refuse(f"the backward passes have the numbers {', '.join(map(str, numbers))} in the order of their start")


def _check_handles(trace: Trace) -> None:
    n_events, saved_values = len(trace.events), set(trace.saved)
    for v, value in enumerate(trace.values):
        first = -1 if value.made_at is None else value.made_at
        for saved, freed in value.handles:
            if not first <= saved <= freed <= n_events:
                _refuse(f"a handle of value {v}, made at event {first}, is saved at {saved} and freed at {freed}")
        if value.handles and v not in saved_values:
            _refuse(f"value {v} has a handle and was not saved")
    is_timeline = trace.events[: len(trace.ops)] != trace.ops or len({unpack.backward for unpack in trace.unpacks}) > 1
    value_of: dict[int, int] = {}
    for t, unpack in zip(trace.unpack_events, trace.unpacks, strict=True):
        value = trace.values[unpack.value]
        if unpack.save < (0 if is_timeline else -1):
            _refuse(f"the unpack at event {t} is of saved tensor {unpack.save}")
        if unpack.save >= 0 and value_of.setdefault(unpack.save, unpack.value) != unpack.value:
            _refuse(f"saved tensor {unpack.save} is of value {value_of[unpack.save]} and of value {unpack.value}")
        if value.made_at is None or not (value.handles or is_timeline):
            continue
        if not any(saved < t <= freed for saved, freed in value.handles):
            _refuse(f"value {unpack.value} is unpacked at event {t}, and no handle of it is alive")


def _check_time(label: str, seconds: float) -> None:
    if not math.isfinite(seconds) or seconds < 0:
        _refuse(f"{label} takes {seconds} s")


def _refuse(why: str) -> NoReturn:
    raise ArgumentError(f"not a valid trace: {why}")
