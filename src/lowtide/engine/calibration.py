"""What recording and replaying cost on this machine beside the kernels, measured once: part of what a plan predicts.

Between two ops of a model a kernel has gone through megabytes, and with them went what the recorder had in the
processor's caches. So each op is timed after such a walk (`coldness`): it then costs two or three times what it does in
a loop of small ops.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from statistics import median
from typing import NamedTuple

import torch

from ..policies import KeepNone
from .coldness import BETWEEN_OPS, BETWEEN_REPLAYS, Walk
from .modules import Whereabouts
from .recorder import Recorder
from .replay import Handle
from .tape import Tape
from .values import Kept, Tensor

_OPS, _ROUNDS = 12, 3


class Calibration(NamedTuple):
    """Seconds."""

    op_s: float
    """To note an op that makes a value."""
    view_s: float
    """To see an op that makes none."""
    replay_s: float
    """To replay an op, without its kernel."""


@lru_cache(maxsize=1)
def calibration() -> Calibration:
    """The time of small ops with a recorder, over that without one."""
    collects = gc.isenabled()
    gc.disable()
    try:
        op_s, noted_s = _least_s(partial(_forward_s, torch.sin)), _least_s(partial(_recorded_s, torch.sin))
        view_s, seen_s = _least_s(partial(_forward_s, _turned)), _least_s(partial(_recorded_s, _turned))
        once_s, again_s = _least_s(partial(_forward_s, torch.sin, BETWEEN_REPLAYS)), _least_s(_replayed_s)
    finally:
        if collects:
            gc.enable()
    return Calibration(
        op_s=max(0.0, noted_s - op_s),
        view_s=max(0.0, seen_s - view_s),
        replay_s=max(0.0, again_s - once_s),
    )


def _least_s(round_s: Callable[[], float]) -> float:
    """The least of some rounds, the first of which pays for what is made but once."""
    return min([round_s() for _ in range(1 + _ROUNDS)][1:])


def _turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _forward_s(op: Callable[[Tensor], Tensor], moved_bytes: int = BETWEEN_OPS) -> float:
    """What an op takes; of many, the one in the middle."""
    walk, times = Walk(moved_bytes), []
    y = torch.ones(8, 8, requires_grad=True)
    with torch.enable_grad():
        for _ in range(_OPS):
            walk()
            start = time.perf_counter()
            y = op(y)
            times.append(time.perf_counter() - start)
    return median(times)


def _recorded_s(op: Callable[[Tensor], Tensor]) -> float:
    """What it takes with a recorder."""
    with _recording([]):
        return _forward_s(op)


def _replayed_s() -> float:
    """What it takes to be made again, in the order of forward, in which each takes the replay of one op."""
    handles: list[Handle | Kept] = []
    with _recording(handles):
        _forward_s(torch.sin)
    walk, times = Walk(BETWEEN_REPLAYS), []
    for handle in handles:
        if isinstance(handle, Handle):
            walk()
            start = time.perf_counter()
            handle.unpack()
            times.append(time.perf_counter() - start)
    return median(times) if times else 0.0


@contextmanager
def _recording(handles: list[Handle | Kept]) -> Iterator[None]:
    """Nothing is kept; autograd's handles come to the list."""
    policy = KeepNone()
    tape = Tape(repr(policy))
    recorder = Recorder(policy, tape, Whereabouts(policy, tape), verify=False)

    def pack(tensor: Tensor) -> Handle | Kept:
        handles.append(recorder.pack(tensor))
        return handles[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.unpack()), recorder:
        yield
