"""What recording and replaying an op cost on this machine, beside its kernel.

Measured once per process. Between two ops of a real model the kernels replace what the recorder had in the processor's
caches, so a loop of small ops alone would measure less than a third of the real cost: each timed call comes after a
copy of several megabytes. Other processes can only make a call slower, so the lower quartile counts.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...policies import KeepNone
from ..recording.module_tracker import ModuleTracker
from ..recording.recorder import Recorder
from ..values.handles import AnyHandle
from ..values.replay_context import ReplayContext
from ..values.scope_counts import ScopeCounts
from ..values.value import Tensor
from .rule import RuleStrategy

_CALLS = 40
_CACHE_BYTES = 2**23
"""Bytes copied before each timed call. Doubled: costs rise by a few per cent."""


class RecordingCosts(NamedTuple):
    """Seconds per op."""

    dispatch_s: float
    """To pass an op through the recorder without recording it."""
    replay_overhead_s: float
    """To record an op in forward and to replay it in backward, without its kernel."""


@functools.cache  # a fact about the machine
def recording_costs() -> RecordingCosts:
    """Measure what small ops cost with a recorder over what they cost without one."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.enable_grad():
            return _measure()
    finally:
        if collects:
            gc.enable()


def _measure() -> RecordingCosts:
    x = torch.ones(8, 8, requires_grad=True)
    policy = KeepNone()
    context = ReplayContext(ScopeCounts(repr(policy)))
    recorder = Recorder(RuleStrategy(policy), context, ModuleTracker(policy, context.add_root))
    handles: list[AnyHandle] = []

    def pack(tensor: Tensor) -> AnyHandle:
        handles.append(recorder.pack(tensor))
        return handles[-1]

    def transpose() -> Any:
        return x.transpose(0, 1)

    plain_view_s, plain_op_s = _seconds(transpose), _seconds(x.sin)
    with recorder:
        recorded_view_s = _seconds(transpose)
    dispatch_s = max(0.0, recorded_view_s - plain_view_s)
    y = x

    def record() -> None:
        nonlocal y
        y = y.sin()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.unpack()), recorder:
        record()
        record_s = _seconds(record) - plain_op_s - dispatch_s
    # In the order of forward, so that each unpack replays one op. The first handle is on a source.
    unpacks = iter([handle.unpack for handle in handles[1:]])
    replay_s = _seconds(lambda: next(unpacks)()) - plain_op_s
    return RecordingCosts(dispatch_s, max(0.0, record_s) + max(0.0, replay_s))


def _seconds(call: Callable[[], object]) -> float:
    """Lower quartile of the seconds that the call takes with cold caches."""
    here, there = np.zeros(_CACHE_BYTES, dtype=np.uint8), np.zeros(_CACHE_BYTES, dtype=np.uint8)
    seconds = []
    for _ in range(_CALLS):
        np.copyto(here, there)
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
        del result  # freed while the clock is stopped
    return sorted(seconds)[_CALLS // 4]
