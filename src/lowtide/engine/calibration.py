"""What recording and replaying cost on this machine beside the kernels, measured once: part of what a plan predicts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from ..policies import KeepNone
from .modules import Whereabouts
from .recorder import Recorder
from .tape import Tape
from .values import Tensor

_OPS, _ROUNDS = 100, 5


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
    """The time of small ops with and without a recorder; the least of a few rounds of each."""
    x = torch.ones(8, 8, requires_grad=True)
    collects = gc.isenabled()
    gc.disable()
    try:
        rounds = [
            [_times_s(work, x, recorded) for work in (_ops, _views) for recorded in (False, True)]
            for _ in range(_ROUNDS)
        ]
    finally:
        if collects:
            gc.enable()
    ops, noted, views, seen = (
        tuple(min(times[way][phase] for times in rounds) / _OPS for phase in (0, 1)) for way in range(4)
    )
    return Calibration(
        op_s=max(0.0, noted[0] - ops[0]),
        view_s=max(0.0, seen[0] - views[0]),
        replay_s=max(0.0, noted[1] - ops[1] - ops[0]),
    )


def _ops(x: Tensor) -> Tensor:
    y = x
    for _ in range(_OPS // 2):
        y = torch.sin(y) * x
    return y


def _views(x: Tensor) -> Tensor:
    y = x
    for _ in range(_OPS // 2):
        y = y.view(64).view(8, 8)
    return y


def _times_s(work: Callable[[Tensor], Tensor], x: Tensor, recorded: bool) -> tuple[float, float]:
    """Of forward and backward."""
    start = time.perf_counter()
    with torch.enable_grad():
        if recorded:
            policy = KeepNone()
            tape = Tape(repr(policy))
            recorder = Recorder(policy, tape, Whereabouts(policy, tape), verify=False)
            hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda handle: handle.unpack())
            with hooks, recorder:
                y = work(x)
        else:
            y = work(x)
        middle = time.perf_counter()
        torch.autograd.grad(y, x, torch.ones_like(y))
    return middle - start, time.perf_counter() - middle
