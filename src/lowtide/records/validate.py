"""Whether the records of a trace agree with each other.

Guarantees what the planner relies on: ids exist, every op comes after what it reads, each value has one
maker, asks are for saved values and grouped by node. It does not doubt
measured times and bytes beyond their sign (`other_bytes` is a difference of measurements and may be slightly negative).
"""

from __future__ import annotations

import math
from typing import NoReturn

from .._errors import ArgumentError
from .trace import TRACE_VERSION, Trace


def check_trace(trace: Trace) -> None:
    """Raise `ArgumentError` at the first contradiction."""
    if trace.version != TRACE_VERSION:
        _refuse(f"it has version {trace.version}, this lowtide reads version {TRACE_VERSION}: profile again")
    times = {
        "a step": trace.step_s,
        "a replay": trace.replay_overhead_s,
        "copying": trace.copying_s,
    }
    for what, seconds in times.items():
        if not _is_time(seconds):
            _refuse(f"{what} takes {seconds} s")
    _check_values(trace)
    _check_ops(trace)
    _check_asks(trace)
    for copied in trace.copies:
        if not 0 <= copied.unpack < len(trace.unpacks):
            _refuse(f"copies make a difference at ask {copied.unpack}, of {len(trace.unpacks)}")
        if trace.unpacks[copied.unpack].rise_bytes + copied.more_rise_bytes < 0:
            _refuse(f"without copies {copied.more_rise_bytes} bytes more come once ask {copied.unpack} is answered")


def _check_values(trace: Trace) -> None:
    n_ops = len(trace.ops)
    for index, value in enumerate(trace.values):
        if value.nbytes < 0:
            _refuse(f"value {index} has {value.nbytes} bytes")
        if value.op is not None:
            if not 0 <= value.op < n_ops:
                _refuse(f"value {index} is made by op {value.op} of {n_ops}")
            if not value.op <= value.user_holds_until <= n_ops:
                _refuse(f"value {index} is made by op {value.op} and dies at op {value.user_holds_until} of {n_ops}")
            if index not in trace.ops[value.op].outputs:
                _refuse(f"value {index} is not among the outputs of op {value.op}")


def _check_ops(trace: Trace) -> None:
    n_values = len(trace.values)
    for index, op in enumerate(trace.ops):
        if not _is_time(op.time_s):
            _refuse(f"op {index} ({op.name}) takes {op.time_s} s")
        if op.replay_s is not None and not _is_time(op.replay_s):
            _refuse(f"op {index} ({op.name}) takes {op.replay_s} s when it is made again")
        for v in (*op.inputs, *op.outputs):
            if not 0 <= v < n_values:
                _refuse(f"op {index} ({op.name}) refers to value {v} of {n_values}")
        if len(set(op.inputs)) < len(op.inputs) or len(set(op.outputs)) < len(op.outputs):
            _refuse(f"op {index} ({op.name}) names a value twice")
        for v in op.inputs:
            maker = trace.values[v].op
            if maker is not None and maker >= index:
                _refuse(f"op {index} ({op.name}) reads value {v}, which is made later, by op {maker}")
        for v in op.outputs:
            if trace.values[v].op != index:
                _refuse(f"op {index} ({op.name}) claims value {v}, which is made by op {trace.values[v].op}")
        for write in op.writes:
            if write.new not in op.outputs or (write.old is not None and write.old not in op.inputs):
                _refuse(f"op {index} ({op.name}) writes {write.old} → {write.new}, not an input and an output of it")
            if write.old is not None and trace.values[write.old].storage != trace.values[write.new].storage:
                _refuse(f"op {index} ({op.name}) writes {write.old} → {write.new}, which have different storages")


def _check_asks(trace: Trace) -> None:
    saved = set(trace.saved)
    if len(saved) < len(trace.saved):
        _refuse("a value is saved twice")
    for v in saved:
        if not 0 <= v < len(trace.values):
            _refuse(f"value {v} of {len(trace.values)} is saved")
    closed: set[int] = set()
    node: int | None = None
    for k, unpack in enumerate(trace.unpacks):
        if unpack.value not in saved:
            _refuse(f"ask {k} is for value {unpack.value}, which was not saved")
        if not _is_time(unpack.time_s):
            _refuse(f"ask {k} takes {unpack.time_s} s")
        if unpack.rise_bytes < 0:
            _refuse(f"{unpack.rise_bytes} bytes come once ask {k} is answered")
        if unpack.node != node:
            if unpack.node in closed:
                _refuse(f"the asks of node {unpack.node} do not follow each other (ask {k})")
            if node is not None:
                closed.add(node)
            node = unpack.node


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


def _refuse(why: str) -> NoReturn:
    raise ArgumentError(f"not a valid trace: {why}")
