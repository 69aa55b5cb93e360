"""What recording and replaying cost on this machine beside the kernels, measured once: part of what a plan predicts.

Between two ops of a model a kernel has gone through megabytes, and with them went what the recorder had in the
processor's caches. So each op is timed after such a walk through memory: it then costs about twice what it does in a
loop of small ops.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import lru_cache
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from ..policies import KeepNone
from .modules import Whereabouts
from .recorder import Recorder
from .tape import Tape
from .values import Tensor

_OPS, _WALK_BYTES, _ROUNDS = 24, 2**21, 2


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
        (op_s, back_s), (noted_s, noted_back_s) = _least_s(torch.sin, False), _least_s(torch.sin, True)
        (view_s, _), (seen_s, _) = _least_s(_turned, False), _least_s(_turned, True)
    finally:
        if collects:
            gc.enable()
    return Calibration(
        op_s=max(0.0, noted_s - op_s),
        view_s=max(0.0, seen_s - view_s),
        replay_s=max(0.0, noted_back_s - back_s - op_s),
    )


def _least_s(op: Callable[[Tensor], Tensor], recorded: bool) -> tuple[float, float]:
    """The least of some rounds, the first of which pays for what is made but once."""
    rounds = [_chain_s(op, recorded) for _ in range(1 + _ROUNDS)][1:]
    return min(forward_s for forward_s, _ in rounds), min(backward_s for _, backward_s in rounds)


def _turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _chain_s(op: Callable[[Tensor], Tensor], recorded: bool) -> tuple[float, float]:
    """What an op takes in forward, and in backward; of many, the one in the middle."""
    here, there = np.zeros(_WALK_BYTES, dtype=np.uint8), np.zeros(_WALK_BYTES, dtype=np.uint8)
    x = torch.ones(8, 8, requires_grad=True)

    def walk() -> None:
        np.copyto(here, there)

    def chain() -> tuple[Tensor, list[float]]:
        y, times = x, []
        for _ in range(_OPS):
            walk()
            start = time.perf_counter()
            y = op(y)
            times.append(time.perf_counter() - start)
        return y, times

    with torch.enable_grad():
        if recorded:
            policy = KeepNone()
            tape = Tape(repr(policy))
            recorder = Recorder(policy, tape, Whereabouts(policy, tape), verify=False)
            hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda handle: handle.unpack())
            with hooks, recorder:
                y, times = chain()
        else:
            y, times = chain()
        start = time.perf_counter()
        torch.autograd.grad(y, x, torch.ones_like(y))
        backward_s = (time.perf_counter() - start) / _OPS
    return median(times), backward_s
