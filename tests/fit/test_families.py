"""Steps of many sizes follow plans that are made from a few profiles."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.runtime import fresh_runtime
from lowtide.reporting.fit_report import FitReport
from tests.allocator import allocator_peak, live_bytes
from tests.scenarios.running import process_bytes

VOCABULARY, WIDTH = 64, 32
Batch = tuple[torch.Tensor | list[torch.Tensor], ...]


class Transformer(nn.Module):
    """Attention written out, so that a part of the memory grows with the square of the length."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * depth))
        self.attention = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            q, k, v = attention(self.norms[2 * i](x)).chunk(3, dim=-1)
            scores = q @ k.mT / WIDTH**0.5
            if mask is not None and not bool(mask.all()):  # as transformers do
                scores = scores.masked_fill(~mask[:, None, :], -1e9)
            x = x + scores.softmax(-1) @ v
            x = x + mlp(self.norms[2 * i + 1](x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        middle = [m for _ in range(6) for m in (nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())]
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16), nn.ReLU(), *middle, nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images).square().mean()


class Detector(nn.Module):
    """Pads a list of images of different sizes to the largest height and width, rounded up."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(14) for m in (nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())]
        self.stages = nn.ModuleList([nn.Conv2d(3, 8, 3, 1, 1), nn.Sequential(*layers), nn.Conv2d(8, 16, 3, 1, 1)])

    def forward(self, images: list[torch.Tensor]) -> torch.Tensor:
        height, width = (-(-max(image.shape[axis] for image in images) // 16) * 16 for axis in (1, 2))
        x = torch.stack([nn.functional.pad(i, (0, width - i.shape[2], 0, height - i.shape[1])) for i in images])
        for stage in self.stages:
            x = nn.functional.max_pool2d(stage(x), 2)
        return x.square().mean()


def ids(batch: int, length: int) -> Batch:
    return (torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length)),)


def images(batch: int, height: int, width: int) -> Batch:
    return (torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(height)),)


def image_list(n: int) -> Batch:
    """Return three images whose sizes depend on n in different ways."""
    return ([images(1, 20 + side % 80, 20 + 3 * side % 90)[0][0] for side in (n, 7 * n, 5 * n + 30)],)


def padded(length: int, has_padding: bool) -> Batch:
    mask = torch.ones(8, length, dtype=torch.bool)
    mask[0, length // 2 :] = not has_padding
    return *ids(8, length), mask


@dataclass
class Run:
    gradients: list[list[torch.Tensor]]
    peaks: list[int]
    online: list[int]
    """The number of steps without a plan, after each step."""
    report: FitReport | None


def run(model: nn.Module, batches: Sequence[Callable[[], Batch]], budget_bytes: int | None = None) -> Run:
    """Run a step with each batch. Peaks are of the allocator, above the model."""
    with fresh_runtime():
        gc.collect()
        start = live_bytes()
        if budget_bytes is not None:
            lowtide.fit(model, budget=budget_bytes + process_bytes())
        found = Run([], [], [], None)
        torch.manual_seed(0)
        for make in batches:
            model.zero_grad(set_to_none=True)
            with allocator_peak() as peak:
                model(*make()).backward()
            found.peaks.append(peak.peak_bytes - start)
            found.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            start += sum(grad.nbytes for grad in found.gradients[-1])
            if budget_bytes is not None:
                found.report = lowtide.report(model)
                found.online.append(found.report.online_steps)
                budget = lowtide.fitting.registry.state_of(model)  # the gradients of earlier steps belong to the test
                budget.limit_bytes += sum(grad.nbytes for grad in found.gradients[-1])
        if budget_bytes is not None:
            lowtide.unfit(model)
        return found


LENGTHS = (40, 90, 64, 120, 33, 77, 101, 52, 90, 128, 45, 119, 70)

CASES: dict[str, tuple[Callable[[], nn.Module], list[Callable[[], Batch]], int]] = {
    "lengths": (Transformer, [lambda n=n: ids(8, n) for n in LENGTHS], 3),
    "batches and lengths": (Transformer, [lambda n=n: ids(3 + n % 5, n) for n in (*LENGTHS, *LENGTHS)], 6),
    "a smaller last batch": (Transformer, [lambda b=b: ids(b, 64) for b in (8, 8, 8, 3, 8, 8, 8, 3, 8, 8)], 2),
    "far longer": (Transformer, [lambda n=n: ids(8, n) for n in (16, 24, 20, 160, 30, 150, 170)], 4),
    "images": (ConvNet, [lambda n=n: images(4, n + n % 7, 2 * n - n % 5) for n in LENGTHS], 6),
    "lists of images": (Detector, [lambda n=n: image_list(n) for n in (*LENGTHS, *LENGTHS[::-1], *LENGTHS)], 8),
}
"""By case: the model, its batches, and the highest number of steps without a plan."""


@pytest.mark.parametrize("case", CASES)
def test_many_sizes(case: str) -> None:
    make_model, batches, max_online = CASES[case]
    torch.manual_seed(0)
    model = make_model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = run(model, batches)
    model.load_state_dict(state)
    budget_bytes = max(2**20, int(0.65 * max(plain.peaks)))
    fitted = run(model, batches, budget_bytes)
    for i, (theirs, ours) in enumerate(zip(plain.gradients, fitted.gradients, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)), f"step {i}"
    shares = [round(peak / budget_bytes, 3) for peak in fitted.peaks]
    assert max(fitted.peaks) <= budget_bytes, shares
    assert fitted.online[-1] <= max_online, fitted.online
    assert fitted.report is not None
    assert fitted.report.step_signatures == 1


def test_steps_that_skip_a_mask_are_a_variant() -> None:
    """The ops depend on the content of the mask. Both kinds of steps follow plans after a while."""
    kinds = [True, True, False, True, False, True, True, False, True, False, True, False, True]
    batches = [lambda n=n, k=k: padded(n, k) for n, k in zip(LENGTHS, kinds, strict=True)]
    torch.manual_seed(0)
    model = Transformer()
    plain = run(model, batches)
    fitted = run(model, batches, max(2**20, int(0.65 * max(plain.peaks))))
    for theirs, ours in zip(plain.gradients, fitted.gradients, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert fitted.online[-1] < len(batches) // 2, fitted.online
