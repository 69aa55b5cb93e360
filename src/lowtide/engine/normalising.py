"""Batch norms are made again without their statistics, which autograd saves anyway: one pass instead of three.

In training a batch norm first reads all of its input for means and deviations, then once more to scale it. Both
statistics are small and kept for backward, so a replay needs the last pass only: the same kernel in evaluation, told
that the deviation is one and given the weight divided by the true one. It then computes `weight / deviation * x + rest`
from the same numbers in the same order, so the bits are the same (Rule 1); a check per dtype says so on this machine
before it is relied on, and verification (Rule 10) on the values themselves. It writes no running statistics (Rule 7).

On CPU, in single and double precision, where nothing is laid out with gaps (torch has another formula for that);
everything else is replayed as it ran. What the statistics are made from is not
known any more: they count as sources, held by whoever needs them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from .effects import OpFacts, facts_of
from .torch_private import below_autograd, without_modes
from .values import Origin, Tensor

_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_DTYPES = (torch.float32, torch.float64)
_TRAINING = 5  # its position among the arguments


def applies(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what this op has made can be made again from its statistics."""
    if facts.func is not _BATCH_NORM or kwargs or not args[_TRAINING]:
        return False
    x, *of_channels = args[:_TRAINING]
    dtype = x.dtype
    return (
        dtype in _DTYPES
        and x.device.type == "cpu"
        and (x.is_contiguous() or any(x.is_contiguous(memory_format=layout) for layout in _layouts(x)))
        and all(one is None or (one.dtype is dtype and one.is_contiguous()) for one in of_channels)
        and _reproduces(dtype)
    )


def _layouts(x: Tensor) -> tuple[torch.memory_format, ...]:
    return {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}.get(x.dim(), ())


def from_statistics(origin: Origin, args: tuple[Any, ...], out: Any) -> tuple[Origin, tuple[Any, ...]]:
    """The same op as a replay runs it: another function, its arguments."""
    x, weight, bias = args[:3]
    _, mean, inverse_deviation = out
    return Origin(origin.number, _facts(), origin.place), (x, weight, bias, mean, inverse_deviation)


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor) -> Tensor:
    scale = inverse if weight is None else inverse * weight
    out: Tensor = _BATCH_NORM(x, scale, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    return out


@lru_cache(maxsize=1)
def _facts() -> OpFacts:
    """Of the shorter op; it goes by the name of the one that ran."""
    facts = OpFacts(_BATCH_NORM)
    facts.call = _normalised
    facts.statistics = False
    facts.writes = ()
    assert facts.name == facts_of(_BATCH_NORM).name
    return facts


@lru_cache
def _reproduces(dtype: torch.dtype) -> bool:
    """Whether both ways give the same bits here: for values, means and deviations of all sizes, in every layout."""
    with without_modes(), below_autograd(), torch.no_grad():
        spread = torch.linspace(-3, 3, 24, dtype=torch.float64)
        waves = torch.sin(torch.arange(6 * 24 * 7 * 9, dtype=torch.float64)).view(6, 24, 7, 9)
        x = (waves * spread.exp().view(24, 1, 1) + 40 * spread.view(24, 1, 1)).to(dtype)
        weight, bias = spread.cos().to(dtype), 10 * spread.sin().to(dtype)
        flat, row = x[:, :, 0, 0].contiguous(), x[:, :, 0].contiguous()
        inputs = (x, x.contiguous(memory_format=torch.channels_last), row, flat)
        return all(_same(one, *parameters) for one in inputs for parameters in ((weight, bias), (None, None)))


def _same(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    once, mean, inverse = _BATCH_NORM(x, weight, bias, None, None, True, 0.1, 1e-5)
    again = _normalised(x, weight, bias, mean, inverse)
    return torch.equal(once, again) and once.stride() == again.stride()
