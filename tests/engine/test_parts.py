"""Ops that write a part of a storage, while autograd has saved another part of it."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.values.value import Value
from lowtide.engine.values.view import Ref, are_disjoint
from lowtide.policies import Decision, OpInfo
from lowtide.profiling.peak_meter import PeakMeter
from tests.runtimes import ledger

from .test_traps import Count

ROWS, WIDTH = 6, 8


@dataclass(frozen=True)
class Keep(lowtide.Policy):
    """Keep the results of one op."""

    op: str

    def decide(self, op: OpInfo) -> Decision:
        kept = op.name.removeprefix("aten.").split(".")[0] == self.op
        return Decision.KEEP if kept else Decision.RECOMPUTE


def elements(view: torch.Tensor, n: int) -> set[int]:
    return set(torch.arange(n).as_strided(view.size(), view.stride(), view.storage_offset()).flatten().tolist())


def test_disjoint_views_share_no_element() -> None:
    choose = random.Random(0)
    n = 120
    base = torch.zeros(n)
    value = Value(None, base.untyped_storage().nbytes(), None)
    found = 0

    def view() -> torch.Tensor:
        while True:
            size = [choose.randint(1, 4) for _ in range(choose.randint(0, 3))]
            stride = [choose.choice([0, 1, 2, 3, 4, 6, 12, 24]) for _ in size]
            last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            if last < n:
                return base.as_strided(size, stride, choose.randrange(n - last))

    for _ in range(20_000):
        one, other = view(), view()
        if are_disjoint(Ref(value, one), other):
            found += 1
            assert not elements(one, n) & elements(other, n)
    assert found > 1000


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_chunks_are_disjoint(dim: int) -> None:
    x = torch.zeros(4, 6, 8)
    value = Value(None, x.untyped_storage().nbytes(), None)
    parts = x.chunk(2, dim)
    assert are_disjoint(Ref(value, parts[0]), parts[1])
    assert are_disjoint(Ref(value, parts[1]), parts[0])
    assert not are_disjoint(Ref(value, parts[0]), parts[0])
    assert not are_disjoint(Ref(value, parts[0]), x)
    assert not are_disjoint(Ref(value, parts[0]), parts[1].view(torch.int16))
    assert not are_disjoint(Ref(value, x.expand(2, 4, 6, 8)), parts[0])


def gates(x: torch.Tensor) -> torch.Tensor:
    """Apply four functions in place, each to a part, as an LSTM cell does. Autograd saves all four results."""
    a, b, c, d = (x * 2).unsafe_chunk(4, 1)
    a, b, c, d = a.sigmoid_(), b.tanh_(), c.exp_(), d.sigmoid_()
    return a * b + c * d


def grads(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(function(x).square().sum(), x)[0]


@pytest.mark.parametrize(
    "scope",
    [
        lambda: lowtide.saving(lowtide.KeepAll()),
        lambda: lowtide.saving(lowtide.KeepNone()),
        lambda: lowtide.saving(Keep("sigmoid_")),
        lambda: lowtide.saving(Keep("tanh_")),
        lambda: lowtide.budget("1 GiB"),
    ],
)
def test_parts_that_are_not_written_are_exact(scope: Callable[[], Any]) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with scope():
        ours = grads(gates, x)
    assert torch.equal(ours, grads(gates, x))


def test_each_part_is_replayed_once_and_not_copied() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with lowtide.saving(lowtide.KeepNone()):
        loss = gates(x).square().sum()
    with Count() as count:
        loss.backward()
    replayed = [name for name in count.names if name in ("aten::sigmoid_", "aten::tanh_", "aten::exp_")]
    assert sorted(replayed) == ["aten::exp_", "aten::sigmoid_", "aten::sigmoid_", "aten::tanh_"]
    assert lowtide.report().bytes_copied == 0


def test_a_part_that_is_written_later_is_recomputed_as_it_was_saved() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        whole = x * 2
        a, b = whole.unsafe_chunk(2, 1)
        out = a.sigmoid_() * b.tanh_()
        with torch.no_grad():
            whole.detach()[:, 1:3].zero_()  # overlaps with `a`, which autograd has saved
        return out

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    plain = torch.autograd.grad(((x * 2)[:, :4].sigmoid() * (x * 2)[:, 4:].tanh()).square().sum(), x)[0]
    with lowtide.saving(lowtide.KeepNone()):
        loss = function(x).square().sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], plain)


def test_a_step_with_an_lstm_cell_is_planned_with_its_plain_peak() -> None:
    torch.manual_seed(0)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(4, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = c = x.new_zeros(x.shape[1], 64)
            for item in x:
                h, c = self.cell(item, (h, c))
            return h

    gc.collect()
    ledger().count_everything()
    others_bytes = ledger().live_bytes
    model, x = Chain(), torch.randn(10, 32, 4)
    plan = lowtide.plan(model, x, "1 GiB", loss=lambda out: out.square().mean())
    with PeakMeter() as meter:
        model(x).square().mean().backward()
    assert abs((plan.plain_peak_bytes - others_bytes) / meter.peak_bytes - 1) < 0.03
