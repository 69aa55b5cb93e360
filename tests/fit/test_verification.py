"""Profiled steps of fitted models check ops once per signature, and still find what must not be recomputed."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.runtime import fresh_runtime
from tests.scenarios.running import process_bytes

WIDTH = 2**15
N = 8
BUDGET_BYTES = 2**21
"""Less than half of the plain peak: values must be recomputed in the profiled step."""


def fill_unrecorded(tensor: torch.Tensor, value: float) -> None:
    """Write memory as a raw kernel does, which torch does not see."""
    assert tensor.is_contiguous()
    row = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    for i in range(tensor.numel()):
        row[i] = value


class RawWrites(nn.Module):
    """Layers of equal shapes. In every other one a raw kernel writes into a copy, or into a new buffer of zeros."""

    def __init__(self, new_buffer: bool) -> None:
        super().__init__()
        self.new_buffer = new_buffer
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for i in range(N):
            copy = torch.zeros(x.shape) if self.new_buffer else x.detach().clone()
            if i % 2:
                fill_unrecorded(copy, float(i))
            x = (x * copy.cos()).sin() * self.weight
        return x.square().sum()


class Scatter(nn.Module):
    """An op that reads indices. Called again with the same arguments, it gives other results, except the first op."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.index = torch.arange(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(N):
            x = (drifting_scatter(x * self.weight, self.index)).sin()
        return x.square().sum()


seen: list[float] = []


@torch.library.custom_op("lowtide_test_fit::drifting_scatter", mutates_args=())
def drifting_scatter(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    key = float(x.sum())
    drifts = key in seen[2:]
    seen.append(key)
    return x[index] + float(drifts)


drifting_scatter.register_autograd(lambda ctx, g: (g, None))


def gradient(model: nn.Module, **options: Any) -> torch.Tensor:
    """Return the gradient of the weight after one step, fitted if there are options."""
    seen.clear()
    x = torch.linspace(-1, 1, WIDTH)
    with fresh_runtime():
        if options:
            lowtide.fit(model, budget=BUDGET_BYTES + process_bytes(), **options)
        model(x).backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("new_buffer", [False, True])
def test_raw_writes_in_a_profiled_step(new_buffer: bool) -> None:
    plain = gradient(RawWrites(new_buffer))
    assert torch.equal(plain, gradient(RawWrites(new_buffer), verify=True))
    model = RawWrites(new_buffer)
    with lowtide.saving(lowtide.KeepNone()):
        loss = model(torch.linspace(-1, 1, WIDTH))
    loss.backward()
    assert not torch.equal(plain, model.weight.grad)  # without verification, the write is lost in a replay


def test_ops_with_indices_are_checked_in_every_call() -> None:
    lowtide.allow_replay("lowtide_test_fit::drifting_scatter")
    plain = gradient(Scatter())
    seen.clear()
    with fresh_runtime():
        model = lowtide.fit(Scatter(), budget="1 GiB")
        model(torch.linspace(-1, 1, WIDTH)).backward()
        (pin,) = lowtide.report().pinned
    assert torch.equal(plain, model.weight.grad)
    assert (pin.op, pin.count) == ("lowtide_test_fit.drifting_scatter.default", N - 1)  # all but the first op
