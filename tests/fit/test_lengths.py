"""Steps whose loops have different numbers of iterations."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import lowtide
from tests.allocator import allocator_peak, live_bytes

ROWS, WIDTH = 256, 64


class Loop(nn.Module):
    """Applies the same layers `n` times, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 1
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.LayerNorm(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.n):
            x = self.layers(x)
        return x.square().mean()


class Run:
    """Steps with these numbers of iterations: gradients, peaks and the model."""

    def __init__(self, lengths: Sequence[int], budget: int | None = None) -> None:
        torch.manual_seed(0)
        gc.collect()
        start = live_bytes()
        self.model = Loop()
        x = torch.randn(ROWS, WIDTH)
        if budget is not None:
            lowtide.fit(self.model, budget=budget)
        self.grads: list[list[torch.Tensor]] = []
        self.peaks: list[int] = []
        self.online: list[int] = []
        for self.model.n in lengths:
            self.model.zero_grad()
            with allocator_peak() as peak:
                self.model(x).backward()
            self.peaks.append(peak.peak_bytes - start)
            self.grads.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
            if budget is not None:
                self.online.append(lowtide.report(self.model).online_steps)
                start += sum(grad.nbytes for grad in self.grads[-1])
        if budget is not None:
            lowtide.unfit(self.model)


def assert_exact(plain: Run, ours: Run) -> None:
    for theirs, own in zip(plain.grads, ours.grads, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, own, strict=True))


def process_bytes() -> int:
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_plan_serves_shorter_steps() -> None:
    lengths = [12, 12, 9, 12, 12, 3, 1, 11, 12]
    plain = Run(lengths)
    budget = int(0.6 * max(plain.peaks)) + process_bytes()
    ours = Run(lengths, budget)
    assert_exact(plain, ours)
    # The first step that differs leaves its plan, and the next one is profiled: perhaps all steps are shorter now.
    assert ours.online == [1, 1, 2, 3, 3, 3, 3, 3, 3]


def test_plans_are_made_for_the_longest_steps() -> None:
    lengths = [4, 12, 6, 12, 4, 12, 6, 4, 12, 12, 11, 3, 12]
    plain = Run(lengths)
    ours = Run(lengths, int(0.6 * max(plain.peaks)) + process_bytes())
    assert_exact(plain, ours)
    assert ours.online[6:] == ours.online[6:7] * len(ours.online[6:])


@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_step_that_is_longer_than_its_plan_stays_within_the_budget(before: int) -> None:
    lengths = [5] * before + [12]
    plain = Run(lengths)
    budget = int(0.6 * max(plain.peaks))
    assert plain.peaks[0] > 0.5 * budget  # the plan for the shorter steps keeps most values
    ours = Run(lengths, budget + process_bytes())
    assert_exact(plain, ours)
    assert max(ours.peaks) <= budget
    assert ours.online[-2:] == [1, 2]
