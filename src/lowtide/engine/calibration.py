"""What recording one op costs on this machine, measured once for the process: part of what a plan predicts."""

from __future__ import annotations

import gc
import time
from functools import lru_cache

import torch

from ..policies import KeepNone
from .modules import Whereabouts
from .recorder import Recorder
from .tape import Tape
from .values import Tensor

_OPS, _ROUNDS = 100, 5


@lru_cache(maxsize=1)
def recording_s_per_op() -> float:
    """The time of small ops under a recorder, over that without one; the least of a few rounds of each."""
    x = torch.ones(8, 8, requires_grad=True)
    collects = gc.isenabled()
    gc.disable()
    try:
        rounds = [(_chain_s(x, recorded=False), _chain_s(x, recorded=True)) for _ in range(_ROUNDS)]
    finally:
        if collects:
            gc.enable()
    plain_s, recorded_s = min(plain for plain, _ in rounds), min(recorded for _, recorded in rounds)
    return max(0.0, recorded_s - plain_s) / _OPS


def _chain_s(x: Tensor, recorded: bool) -> float:
    def chain() -> None:
        y = x
        for _ in range(_OPS // 2):
            y = torch.sin(y) * x

    start = time.perf_counter()
    with torch.enable_grad():
        if recorded:
            policy = KeepNone()
            tape = Tape(repr(policy))
            recorder = Recorder(policy, tape, Whereabouts(policy, tape), verify=False)
            hooks = torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda handle: handle.unpack())
            with hooks, recorder:
                chain()
        else:
            chain()
    return time.perf_counter() - start
