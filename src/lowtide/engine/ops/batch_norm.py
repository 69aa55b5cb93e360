"""Batch norms are replayed from their saved statistics: one pass over the input instead of three.

In training a batch norm reads its whole input for means and deviations, then again to scale it. Autograd keeps both
statistics, so a replay needs the last pass only: the same kernel in evaluation mode, with a deviation of one and the
weight divided by the true deviation. It computes `weight / deviation * x + rest` from the same numbers in the same
order, so the bits are the same (Rule 1). This is checked once per dtype on this machine, and by verification (Rule
10). The replay writes no running statistics (Rule 7).

Applies on CPU, in single and double precision, to dense layouts; other batch norms are replayed as they ran. The
statistics become sources: their recipe is unknown.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch

from ...torch_compat import below_autograd, without_modes
from .facts import OpFacts, facts_of

Tensor = torch.Tensor
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_DTYPES = (torch.float32, torch.float64)
_TRAINING = 5  # its position among the arguments


def applies(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this op can be replayed from its statistics."""
    if facts.func is not _BATCH_NORM or kwargs or not args[_TRAINING]:
        return False
    x, *of_channels = args[:_TRAINING]
    dtype = x.dtype
    return (
        dtype in _DTYPES
        and x.device.type == "cpu"
        and (x.is_contiguous() or any(x.is_contiguous(memory_format=layout) for layout in _layouts(x)))
        and all(one is None or (one.dtype is dtype and one.is_contiguous()) for one in of_channels)
        and reproduces(dtype)
    )


def _layouts(x: Tensor) -> tuple[torch.memory_format, ...]:
    return {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(x.dim(), ())


def from_statistics(args: tuple[Any, ...], out: Any) -> tuple[OpFacts, tuple[Any, ...]]:
    """Return the op that a replay runs instead, and its arguments."""
    x, weight, bias = args[:3]
    _, mean, inverse_deviation = out
    return _facts(), (x, weight, bias, mean, inverse_deviation)


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor) -> Tensor:
    """Return the output of a batch norm, computed from its statistics."""
    scale = inverse if weight is None else inverse * weight
    out: Tensor = _BATCH_NORM(x, scale, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    return out


@lru_cache(maxsize=1)  # a fact about an op
def _facts() -> OpFacts:
    """Return the facts of the shorter op, under the name of the op that ran."""
    facts = OpFacts(_BATCH_NORM)
    facts.call = normalised
    facts.statistics = False
    facts.writes = ()
    assert facts.name == facts_of(_BATCH_NORM).name
    return facts


@lru_cache  # a fact about the machine
def reproduces(dtype: torch.dtype) -> bool:
    """Return whether both kernels give the same bits on this machine, for many magnitudes and all layouts.

    This runs in the first step, beside its live bytes. So it tests small inputs, one after the other.
    """
    with without_modes(), below_autograd(), torch.no_grad():
        return all(_reproduces(dtype, first) for first in range(0, 40_000, 10_000))


def _reproduces(dtype: torch.dtype, first: int) -> bool:
    shape = 6, 24, 3, 6
    spread = torch.linspace(-3, 3, 24, dtype=torch.float64)
    waves = torch.arange(first, first + math.prod(shape), dtype=torch.float64).sin_().view(shape)
    x = waves.mul_(spread.exp().view(24, 1, 1)).add_(40 * spread.view(24, 1, 1)).to(dtype)
    weight, bias = spread.cos().to(dtype), 10 * spread.sin().to(dtype)
    flat, row = x[:, :, 0, 0].contiguous(), x[:, :, 0].contiguous()
    inputs = (x, x.contiguous(memory_format=torch.channels_last), row, flat)
    return all(_same(one, *parameters) for one in inputs for parameters in ((weight, bias), (None, None)))


def _same(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    once, mean, inverse = _BATCH_NORM(x, weight, bias, None, None, True, 0.1, 1e-5)
    replayed = normalised(x, weight, bias, mean, inverse)
    return torch.equal(once, replayed) and once.stride() == replayed.stride()
