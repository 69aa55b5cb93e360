"""The budget covers the peak of torch's allocator, workspace of kernels included, in every step."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from benchmarks.harness.models import lstm, unet
from torch import nn

import lowtide
from lowtide.codecs.costs import measure_codec_cost
from lowtide.engine.runtime import fresh_runtime
from lowtide.fitting.plan import profile
from lowtide.planning import simulate
from tests.allocator import allocator_peak, live_bytes
from tests.runtimes import ledger

from ..engine import deep
from ..engine.budgets import fixed_bytes
from ..engine.steps import default_loss, loss_of

Made = tuple[nn.Module, Any]
STEPS = 5


def mlp() -> Made:
    widths = [64, *[256] * 8, 8]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers, nn.Dropout(0.1)), (torch.randn(512, 64),)


def conv_net() -> Made:
    widths = [3, *[16] * 6]
    blocks = [
        part
        for a, b in itertools.pairwise(widths)
        for part in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)), (torch.randn(8, 3, 48, 48),)


class Filled(nn.Module):
    """Layers whose values are filled with a tensor. No mode watches the gradient formula of this op."""

    def __init__(self, layers: int = 4, size: int = 256) -> None:
        super().__init__()
        self.weights = nn.ParameterList(0.1 * torch.randn(size, size) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            big = x @ weight
            filled = big.masked_fill((big @ weight.detach()).sigmoid() > 0.5, torch.tensor(0.5))
            x = filled.mean(0, keepdim=True).expand(x.shape[0], -1) + 0.1
        return x.sum()


class Pixels(nn.Module):
    """Depthwise convolutions of images of one pixel, which are contiguous in two layouts."""

    def __init__(self, channels: int = 40) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.second = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        channels_last = self.first(x[:, None, None, :].permute(0, 3, 1, 2))
        return channels_last + self.second(x[:, :, None, None].contiguous())


class Blanked(nn.Module):
    """A mask is applied in place to views of large values. No mode watches the gradient formula of such an op."""

    def __init__(self, kind: str, layers: int = 3, size: int = 128) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(x)
            view, mask = hidden.view(-1, *hidden.shape), hidden.detach() > 0
            if self.kind == "filled":
                view.masked_fill_(mask, 0.0)
            else:
                view.mul_(mask[0].float())
            x = hidden.tanh()
        return x


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": mlp,
    "conv_net": conv_net,
    "gpt2": lambda: deep.build("gpt2"),
    "lstm": lambda: lstm(6, 64, 16, 32).build(),
    "unet": lambda: unet(4, 48, (16, 32, 64)).build(),
}


class Run:
    """A model, its plain step, and steps under a budget, all measured by the counting allocator."""

    def __init__(self, make: Callable[[], Made]) -> None:
        live_bytes()  # count from now on
        torch.manual_seed(0)
        self.model, self.batch = make()
        self.model.train()
        self.fixed = fixed_bytes(self.model, self.batch)
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.step()  # kernels may keep memory from their first call
        self.plain, self.plain_peak_bytes = self.step()

    def step(self) -> tuple[dict[str, torch.Tensor], int]:
        """Run one step. Return its results, and the peak without memory that belongs to the test."""
        self.model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])
        gc.collect()
        torch.manual_seed(7)
        with allocator_peak() as peak:
            loss = default_loss(self.model, self.batch)
            loss.backward()
        results = {"loss": loss.detach().clone()}
        results |= {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        results |= {f"buffer {name}": b.clone() for name, b in self.model.named_buffers()}
        self.model.zero_grad(set_to_none=True)
        return results, self.fixed + peak.rise_bytes

    def other_bytes(self) -> int:
        """Bytes that the budget counts and that are not of the model or its batch."""
        gc.collect()
        ledger().count_everything()
        return ledger().live_bytes - self.fixed

    def budgeted_steps(self) -> Iterator[int]:
        """Yield the peak of steps that must be bit-equal to the plain step."""
        for _ in range(STEPS):
            results, peak_bytes = self.step()
            assert results.keys() == self.plain.keys()
            for name, result in results.items():
                assert torch.equal(result, self.plain[name]), name
            del results, result
            yield peak_bytes


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_step_holds_its_budget(name: str) -> None:
    with fresh_runtime():
        run = Run(MODELS[name])
        other = run.other_bytes()
        limit = int(0.6 * run.plain_peak_bytes)
        lowtide.fit(run.model, budget=limit + other, stores=None, codecs=None)
        peaks = list(run.budgeted_steps())
        assert max(peaks) <= limit
        report = lowtide.report(run.model)
        assert report.online_steps == 1
        assert report.predicted_peak_bytes is not None
        assert report.measured_peak_bytes is not None
        for counted in peaks[1:]:
            assert abs(report.predicted_peak_bytes - other - counted) <= 0.03 * counted
            assert abs(report.measured_peak_bytes - other - counted) <= 0.03 * counted
        lowtide.unfit(run.model)


def test_planning_allocates_nothing_in_the_step() -> None:
    with fresh_runtime():
        measure_codec_cost.cache_clear()
        run = Run(
            lambda: (nn.Sequential(*[nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)] * 8), (torch.randn(256, 16),))
        )
        limit = int(0.7 * run.plain_peak_bytes)
        lowtide.fit(run.model, budget=f"{limit + run.other_bytes()} B")
        assert max(run.budgeted_steps()) <= limit
        lowtide.unfit(run.model)


def test_the_results_of_unwatched_formulas_are_counted() -> None:
    with fresh_runtime():
        run = Run(lambda: (Filled(), (torch.randn(4096, 256),)))
        limit = int(0.9 * run.plain_peak_bytes)
        lowtide.fit(run.model, budget=limit + run.other_bytes(), stores=None, codecs=None)
        assert max(run.budgeted_steps()) <= limit
        lowtide.unfit(run.model)


@pytest.mark.parametrize("kind", ["filled", "multiplied"])
def test_the_memory_of_an_unwatched_formula_is_measured(kind: str) -> None:
    with fresh_runtime():
        run = Run(lambda: (Blanked(kind), (torch.randn(4096, 128),)))
        other = run.other_bytes()
        trace = profile(run.model, run.batch, loss=loss_of)
        keep_all = simulate(trace, [True] * len(trace.ops)).peak_bytes - other
        assert abs(keep_all - run.plain_peak_bytes) <= 0.01 * run.plain_peak_bytes


def test_the_trace_has_the_workspace_of_each_op() -> None:
    with fresh_runtime():
        run = Run(conv_net)
        (image,), conv = run.batch, run.model[0]
        trace = profile(run.model, run.batch, loss=lambda out: out.float().square().mean())
        first = next(op for op in trace.ops if op.name == "aten.convolution.default")
        with torch.no_grad(), allocator_peak() as peak:
            out = conv(image)
        assert first.workspace_bytes == peak.rise_bytes - out.nbytes
        assert first.workspace_bytes >= out.nbytes
        assert first.other_bytes >= first.workspace_bytes
        other = run.other_bytes() - out.nbytes
        keep_all = simulate(trace, [True] * len(trace.ops)).peak_bytes - other
        assert abs(keep_all - run.plain_peak_bytes) <= 0.01 * run.plain_peak_bytes


def test_workspace_depends_on_the_strides_of_single_pixels() -> None:
    with fresh_runtime():
        run = Run(lambda: (Pixels(), (torch.randn(32, 40),)))
        other = run.other_bytes()
        trace = profile(run.model, run.batch, loss=loss_of)
        keep_all = simulate(trace, [True] * len(trace.ops)).peak_bytes - other
        assert abs(keep_all - run.plain_peak_bytes) <= 0.01 * run.plain_peak_bytes
