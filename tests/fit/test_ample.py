"""Where everything fits with room to spare, a fitted model is plain PyTorch, and still counted and looked after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.runtimes import current_recorder, open_steps

from ..engine.steps import assert_equal, run_step
from .test_fit import DROP_ONLY, stack


class Witness(nn.Module):
    """Notes whether its calls are recorded, and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stack(3)
        self.recorded: list[bool] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recorded.append(current_recorder() is not None)
        y: torch.Tensor = self.inner(x)
        if self.fails:
            raise OSError("as planned")
        return y


def test_steps_that_keep_everything_are_left_alone() -> None:
    model = Witness()
    x = torch.randn(16, 64)
    plain = run_step(model, (x,))
    lowtide.fit(model, budget="64 GiB", **DROP_ONLY)
    model.recorded.clear()
    for _ in range(9):
        assert_equal(plain, run_step(model, (x,)))
    # One to profile, five that have to go as planned, and from then on nothing but a count.
    assert model.recorded == [True] * 6 + [False] * 3
    report = lowtide.report(model)
    assert (report.steps, report.online_steps) == (9, 1)
    assert not open_steps()
    lowtide.unfit(model)


def test_not_where_the_budget_is_only_just_enough() -> None:
    model = Witness()
    x = torch.randn(512, 64)
    lowtide.fit(model, budget="64 GiB", **DROP_ONLY)
    for _ in range(3):
        model(x).sum().backward()
    peak = lowtide.report(model).predicted_peak_bytes
    assert peak is not None
    lowtide.fit(model, budget=int(peak * 1.05), **DROP_ONLY)
    for _ in range(9):
        model(x).sum().backward()
    assert all(model.recorded)
    lowtide.unfit(model)


def test_failures_and_steps_without_backward_leave_nothing() -> None:
    model = Witness()
    x = torch.randn(16, 64)
    plain = run_step(model, (x,))
    lowtide.fit(model, budget="64 GiB", **DROP_ONLY)
    for _ in range(9):
        model(x).sum().backward()
    model.fails = True
    with pytest.raises(OSError, match="as planned"):
        model(x)
    assert not open_steps()
    model.fails = False
    for _ in range(3):
        model(x)
    assert len(open_steps()) == 1
    model.zero_grad()
    assert_equal(plain, run_step(model, (x,)))
    assert not open_steps()
    lowtide.unfit(model)


def test_other_shapes_are_profiled_still() -> None:
    model = Witness()
    lowtide.fit(model, budget="64 GiB", **DROP_ONLY)
    sizes: list[Any] = [16] * 8 + [8]
    for rows in sizes:
        model(torch.randn(rows, 64)).sum().backward()
        model.zero_grad()
    assert model.recorded == [True] * 6 + [False] * 2 + [True]
    lowtide.unfit(model)
