"""What recording and replaying cost on this machine beside the kernels, measured once: part of what a plan predicts.

Between two ops of a model a kernel has gone through megabytes, and with them went what the recorder had in the
processor's caches. So each op is timed after such a walk (`coldness`): it then costs two or three times what it does in
a loop of small ops.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch

from ..policies import KeepNone
from .coldness import Walk
from .modules import Whereabouts
from .recorder import Recorder
from .replay import Handle
from .tape import Tape
from .values import Kept, Tensor

_OPS, _ROUNDS = 24, 3


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
        (op_s, _), (noted_s, again_s) = _least_s(torch.sin, False), _least_s(torch.sin, True)
        (view_s, _), (seen_s, _) = _least_s(_turned, False), _least_s(_turned, True)
    finally:
        if collects:
            gc.enable()
    return Calibration(
        op_s=max(0.0, noted_s - op_s),
        view_s=max(0.0, seen_s - view_s),
        replay_s=max(0.0, again_s - op_s),
    )


def _least_s(op: Callable[[Tensor], Tensor], recorded: bool) -> tuple[float, float]:
    """The least of some rounds, the first of which pays for what is made but once."""
    rounds = [_chain_s(op, recorded) for _ in range(1 + _ROUNDS)][1:]
    return min(forward_s for forward_s, _ in rounds), min(again_s for _, again_s in rounds)


def _turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _chain_s(op: Callable[[Tensor], Tensor], recorded: bool) -> tuple[float, float]:
    """What an op takes in forward, and what it takes to be made again; of many, the one in the middle."""
    walk = Walk()
    x = torch.ones(8, 8, requires_grad=True)
    handles: list[Handle | Kept] = []

    def timed(action: Callable[[], Any]) -> tuple[Any, float]:
        walk()
        start = time.perf_counter()
        out = action()
        return out, time.perf_counter() - start

    def chain() -> list[float]:
        y, times = x, []
        for _ in range(_OPS):
            y, seconds = timed(partial(op, y))
            times.append(seconds)
        return times

    with torch.enable_grad():
        if not recorded:
            return median(chain()), 0.0
        policy = KeepNone()
        tape = Tape(repr(policy))
        recorder = Recorder(policy, tape, Whereabouts(policy, tape), verify=False)

        def pack(tensor: Tensor) -> Handle | Kept:
            handles.append(recorder.pack(tensor))
            return handles[-1]

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: handle.unpack()), recorder:
            times = chain()
    # In the order of forward each takes the replay of one op.
    again = [timed(handle.unpack)[1] for handle in handles if isinstance(handle, Handle)]
    return median(times), median(again) if again else 0.0
