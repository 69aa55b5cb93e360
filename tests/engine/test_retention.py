"""Recomputed values that a plan releases after use: exact, and replayed as often as predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.fitting.plan import profile
from lowtide.planning import simulate, solve


class Forked(nn.Module):
    """One value, written in place, that several branches read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = (self.stem(x) + 1).mul_(3)  # autograd does not save it
        return sum(((stem + branch).tanh().square().sum() for branch in range(4)), start=x.sum())


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def fitted(released: tuple[str, ...] = ()) -> Any:
    """Train under a plan that recomputes all replayable ops and releases the values of these ops."""
    model, x = Forked(), torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    plain = gradients(model, x)
    trace = profile(model, (x,))
    names = [op.name for op in trace.ops]
    keep = tuple(op.pinned is not None for op in trace.ops)
    plan = replace(
        solve(trace, 2**60),
        keep=keep,
        released=tuple(sorted(names.index(name) for name in released)),
    )
    predicted = simulate(trace, plan.keep, plan.released)
    lowtide.fit(model, plan=plan, budget=2**60)
    ours = gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    report = lowtide.report()
    assert report is not None
    assert report.replayed_ops == predicted.replayed_ops
    lowtide.unfit(model)
    return {name: predicted.replays[names.index(name)] for name in (BEFORE, INSIDE)}, report


SIZE = 16 * 32 * 4
INSIDE, BEFORE = "aten.mul_.Tensor", "aten.add.Tensor"


def test_a_retained_value_is_replayed_once_in_place() -> None:
    replays, report = fitted()
    assert (replays[INSIDE], replays[BEFORE]) == (1, 1)
    assert report.bytes_copied == 0


def test_a_released_value_is_replayed_on_a_copy_of_a_retained_one() -> None:
    replays, report = fitted(released=(INSIDE,))
    assert (replays[BEFORE], replays[INSIDE]) == (1, 4)
    assert report.bytes_copied == replays[INSIDE] * SIZE


def test_a_released_value_overwrites_a_released_one_without_a_copy() -> None:
    replays, report = fitted(released=(INSIDE, BEFORE))
    assert replays[BEFORE] == replays[INSIDE] == 4
    assert report.bytes_copied == 0
