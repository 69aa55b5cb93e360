"""Measured time of ops, for policies that need costs.

The first few runs of an op with arguments of the same shapes and dtypes are timed. The shortest time is used for the
rest of the process.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ...torch_compat import shape_of
from .facts import OpFacts

_RUNS = 3  # the first run of a kernel often includes its set-up
_MAX_SIGNATURES = 100_000  # the table must not grow without limit if shapes never repeat

_UNKNOWN = (0, float("inf"))
MEASURED: dict[Any, tuple[int, float]] = {}  # cache of facts about ops: timed runs, shortest microseconds


def timed_call(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
    """Run the op. Return its result and the shortest measured time for such arguments, in microseconds."""
    signature = _signature(facts, args)
    runs, best = MEASURED.get(signature, _UNKNOWN)
    if runs >= _RUNS:
        return facts.call(*args, **kwargs), best
    out, cost_us = timed(facts, args, kwargs)
    best = min(best, cost_us)
    if len(MEASURED) >= _MAX_SIGNATURES:
        MEASURED.clear()
    MEASURED[signature] = (runs + 1, best)
    return out, best


def timed(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
    """Run the op. Return its result and the time of this run, in microseconds."""
    _synchronize(args)
    start = time.perf_counter()
    out = facts.call(*args, **kwargs)
    _synchronize(args)
    return out, (time.perf_counter() - start) * 1e6


def _signature(facts: OpFacts, args: tuple[Any, ...]) -> Any:
    return (facts, *[_shape(a) for a in args])


def _shape(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        try:
            return a.shape, a.dtype
        except RuntimeError:  # a strided nested tensor
            return shape_of(a), a.dtype
    if isinstance(a, (list, tuple)):
        return tuple(_shape(item) for item in a)
    return None


def _synchronize(args: tuple[Any, ...]) -> None:
    """Wait for queued ops on an accelerator, where a call returns before its kernel has run."""
    for a in args:
        if isinstance(a, torch.Tensor):
            if a.device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(a.device)
            return
