"""Batch norms are replayed from their statistics, with the same bits, if the kernels allow it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.engine.ops import batch_norm
from lowtide.fitting.plan import profile

from .steps import assert_equal, run_step

BATCH_NORM = torch.ops.aten.native_batch_norm.default
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class BatchNorms(TorchDispatchMode):
    """Records for each batch norm whether it computes statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.training: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is BATCH_NORM:
            self.training.append(args[5])
        return func(*args, **(kwargs or {}))


def replays(norm: nn.Module, x: torch.Tensor) -> list[bool]:
    """Return for each replayed batch norm whether it computes statistics. Also compare gradients."""
    x = x.detach().requires_grad_()
    plain = torch.autograd.grad(norm(x.sin()).exp().sum(), x)[0]
    with lowtide.saving(lowtide.KeepNone()):
        loss = norm(x.sin()).exp().sum()
    with BatchNorms() as mode:
        ours = torch.autograd.grad(loss, x)[0]
    assert torch.equal(ours, plain)
    return mode.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_kernels_give_the_same_bits(dtype: torch.dtype) -> None:
    """If this fails, the kernels of torch for training and evaluation differ. Batch norms are then replayed in full."""
    assert batch_norm.reproduces(dtype)


def test_the_check_rejects_a_different_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    def centred(x: Any, weight: Any, bias: Any, mean: Any, inverse: Any) -> torch.Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        scaled = (x - mean.view(shape)) * inverse.view(shape)
        return scaled if weight is None else scaled * weight.view(shape) + bias.view(shape)

    monkeypatch.setattr(batch_norm, "normalised", centred)
    assert not batch_norm.reproduces.__wrapped__(torch.float32)


def test_a_replay_computes_no_statistics() -> None:
    assert replays(nn.BatchNorm2d(6), torch.randn(4, 6, 5, 7)) == [False]


@pytest.mark.parametrize(
    ("norm", "x"),
    [
        (nn.BatchNorm2d(6), torch.randn(4, 6, 7, 5).transpose(2, 3)),
        (nn.BatchNorm2d(6), torch.randn(4, 6, 5, 14)[..., ::2]),
        (nn.BatchNorm2d(6).bfloat16(), torch.randn(4, 6, 5, 7).bfloat16()),
        (nn.BatchNorm2d(6), torch.randn(4, 6, 5, 7).bfloat16()),
    ],
    ids=["transposed", "with gaps", "bfloat16", "mixed"],
)
def test_unsupported_batch_norms_are_replayed_in_full(norm: nn.Module, x: torch.Tensor) -> None:
    class Strided(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return norm(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(y))

    assert replays(Strided(), x) == [True]


def test_strided_buffers_are_replayed_in_full() -> None:
    norm = nn.BatchNorm1d(6)
    norm.running_mean, norm.running_var = torch.zeros(12)[::2], torch.ones(12)[::2]
    assert replays(norm, torch.randn(9, 6)) == [True]


@given(
    st.integers(2, 5).flatmap(lambda n: st.tuples(*[st.integers(2, 9)] * n)),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.float64]),
    st.floats(-6, 6), st.floats(-6, 6), st.booleans(),
)  # fmt: skip
def test_any_batch_norm_has_the_same_gradients(
    shape: tuple[int, ...], affine: bool, tracks: bool, last: bool, dtype: torch.dtype, mean: float, scale: float,
    verify: bool,
) -> None:  # fmt: skip
    """For means and deviations of all sizes, which round differently."""
    norm = NORMS[len(shape)](shape[1], affine=affine, track_running_stats=tracks, dtype=dtype)
    if affine:
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias, std=10)
    model = nn.Sequential(nn.Tanh(), norm, nn.Sigmoid(), nn.Tanh())
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    x = (x * 10**scale + 10**mean).detach()
    if last and len(shape) >= 4:
        x = x.contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    x.requires_grad_()
    plain = run_step(model, (x,))
    expected, x.grad = x.grad, None
    assert_equal(plain, run_step(model, (x,), lowtide.saving(lowtide.KeepNone(), verify=verify)))
    assert torch.equal(expected, x.grad)


def test_a_trace_has_the_times_of_both_kernels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 3))
    trace = profile(model, (torch.randn(4, 3, 32, 32),), loss=lambda out: out.sum(), verify=True)
    for op in trace.ops:
        assert (op.replay_s is not None) == (op.name == "aten.native_batch_norm.default"), op
        assert len(op.outputs) <= 1, "statistics are sources"
