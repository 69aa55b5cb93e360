"""Under a large budget a fitted model runs as plain PyTorch; its steps are still counted and checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.runtimes import current_recorder, open_steps

from ..engine.steps import assert_equal, run_step
from .test_fit import DROP_ONLY, stack


class RecordsCalls(nn.Module):
    """Records whether its calls are recorded, and can raise an error."""

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


def test_steps_that_keep_everything_run_without_a_recorder() -> None:
    model = RecordsCalls()
    x = torch.randn(16, 64)
    plain = run_step(model, (x,))
    lowtide.fit(model, budget="64 GiB", **DROP_ONLY)
    model.recorded.clear()
    for _ in range(9):
        assert_equal(plain, run_step(model, (x,)))
    # One profiled step, five steps that follow the plan, then steps that are only counted.
    assert model.recorded == [True] * 6 + [False] * 3
    report = lowtide.report(model)
    assert (report.steps, report.online_steps) == (9, 1)
    assert not open_steps()
    lowtide.unfit(model)


def test_not_where_the_budget_is_only_just_enough() -> None:
    model = RecordsCalls()
    x = torch.randn(512, 64)
    lowtide.fit(model, budget="64 GiB", **DROP_ONLY)
    for _ in range(3):
        model(x).sum().backward()
    peak = lowtide.report(model).predicted_peak_bytes
    assert peak is not None
    lowtide.fit(model, budget=f"{int(peak * 1.05)} B", **DROP_ONLY)
    for _ in range(9):
        model(x).sum().backward()
    assert all(model.recorded)
    lowtide.unfit(model)


def test_failures_and_steps_without_backward_leave_nothing() -> None:
    model = RecordsCalls()
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


def test_larger_steps_are_profiled_still_and_smaller_ones_are_not() -> None:
    model = RecordsCalls()
    lowtide.fit(model, budget="64 GiB", **DROP_ONLY)
    sizes: list[Any] = [16] * 8 + [8, 32]
    for rows in sizes:
        model(torch.randn(rows, 64)).sum().backward()
        model.zero_grad()
    assert model.recorded == [True] * 6 + [False] * 3 + [True]
    assert lowtide.report(model).families[0].profiled == ((16, 64),)
    lowtide.unfit(model)
