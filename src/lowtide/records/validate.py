"""Checks of a trace: the facts that planning relies on.

Indices exist, an op comes after the ops whose values it reads, each value is made once, and unpacks are of saved values
and grouped by node. Of measured times and bytes only the sign is checked. `other_bytes` is a difference of measurements
and may be slightly negative.
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
    if trace.events[: len(trace.ops)] != trace.ops:
        _refuse("an op ran after the first unpack")
    _check_values(trace)
    for index, op in enumerate(trace.ops):
        _check_op(trace, op, f"op {index} ({op.name})", index)
    _check_unpacks(trace)
    for effect in trace.copies:
        if not 0 <= effect.unpack < len(trace.unpacks):
            _refuse(f"gradient copies change unpack {effect.unpack} of {len(trace.unpacks)}")
        if trace.unpacks[effect.unpack].rise_bytes + effect.more_rise_bytes < 0:
            _refuse(f"without gradient copies, unpack {effect.unpack} allocates a negative number of bytes")


def _check_values(trace: Trace) -> None:
    n_ops, n_events = len(trace.ops), len(trace.events)
    for index, value in enumerate(trace.values):
        if value.nbytes < 0:
            _refuse(f"value {index} has {value.nbytes} bytes")
        if value.made_at is not None:
            if not 0 <= value.made_at < n_ops:
                _refuse(f"value {index} is made at event {value.made_at}, and there are {n_ops} ops")
            if not value.made_at <= value.held_until <= n_events:
                _refuse(
                    f"value {index} is made at event {value.made_at} and held until event {value.held_until} "
                    f"of {n_events}"
                )
            if index not in trace.ops[value.made_at].outputs:
                _refuse(f"value {index} is not an output of op {value.made_at}")


def _check_op(trace: Trace, op: Op, label: str, index: int) -> None:
    values = trace.values
    _check_time(label, op.time_s)
    _check_time(f"a replay of {label}", op.replay_s or 0.0)
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
    nodes = [node for node, _ in itertools.groupby(unpack.node for unpack in trace.unpacks)]
    for node, runs in Counter(nodes).items():
        if runs > 1:
            _refuse(f"the unpacks of node {node} do not follow each other")


def _check_time(label: str, seconds: float) -> None:
    if not math.isfinite(seconds) or seconds < 0:
        _refuse(f"{label} takes {seconds} s")


def _refuse(why: str) -> NoReturn:
    raise ArgumentError(f"not a valid trace: {why}")
