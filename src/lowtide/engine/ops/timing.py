"""How long ops take, learnt as they run: for policies that weigh time.

An op with arguments of the same shapes and dtypes is timed at its first few runs, and its least time is
remembered for the process.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from .facts import OpFacts

_RUNS = 3  # the first run of a kernel often pays for its set-up
_MOST_SIGNATURES = 100_000  # shapes that never repeat must not grow the table for ever

_UNKNOWN = (0, float("inf"))
_measured: dict[Any, tuple[int, float]] = {}


def timed_call(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
    """Run the op; return its result and the least microseconds measured for arguments of these shapes."""
    signature = _signature(facts, args)
    runs, best = _measured.get(signature, _UNKNOWN)
    if runs >= _RUNS:
        return facts.call(*args, **kwargs), best
    out, cost_us = timed(facts, args, kwargs)
    best = min(best, cost_us)
    if len(_measured) >= _MOST_SIGNATURES:
        _measured.clear()
    _measured[signature] = (runs + 1, best)
    return out, best


def timed(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
    """Run the op: its result, and the microseconds that it took this time."""
    _synchronize(args)
    start = time.perf_counter()
    out = facts.call(*args, **kwargs)
    _synchronize(args)
    return out, (time.perf_counter() - start) * 1e6


def _signature(facts: OpFacts, args: tuple[Any, ...]) -> Any:
    return (facts, *[_shape(a) for a in args])


def _shape(a: Any) -> Any:
    kind = type(a)
    if kind is torch.Tensor or isinstance(a, torch.Tensor):
        return a.shape, a.dtype
    if isinstance(a, (list, tuple)):
        return tuple(_shape(item) for item in a)
    return None


def _synchronize(args: tuple[Any, ...]) -> None:
    """On an accelerator an op has only been queued when its call returns."""
    for a in args:
        if isinstance(a, torch.Tensor):
            if a.device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(a.device)
            return
