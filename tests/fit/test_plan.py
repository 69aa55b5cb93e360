"""`plan` and `frontier` predict without training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide._units import parse_budget
from lowtide.fitting.plan import profile
from lowtide.planning import simulate
from tests.allocator import live_bytes
from tests.runtimes import ledger

from ..engine import deep
from ..engine.budgets import fixed_bytes
from ..engine.steps import assert_equal, run_step


def state(model: nn.Module) -> list[torch.Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers(), *grads, torch.get_rng_state()]]


@pytest.mark.parametrize("with_gradients", [False, True])
def test_nothing_changes(with_gradients: bool) -> None:
    model, batch = deep.build("resnet")
    if with_gradients:
        model(**batch).loss.backward()
    model.eval()
    before = state(model)
    lowtide.plan(model, batch, "1 GiB")
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))


def test_a_plan_is_obeyed_from_the_first_step(tmp_path: Path) -> None:
    model, batch = deep.build("gpt2")
    plain = run_step(model, batch)
    ledger().count_everything()
    trace = profile(model, batch)
    limit = int(0.6 * trace.peak_bytes)
    plan = lowtide.plan(model, batch, f"{limit} B")
    assert plan.predicted_peak_bytes <= limit
    plan.save(tmp_path / "plan.json")
    released = type(plan).load(tmp_path / "plan.json")
    assert released == plan
    lowtide.fit(model, plan=released)
    step = run_step(model, batch)
    assert_equal(plain, step)
    report = lowtide.report(model)
    assert report.online_steps == 0
    assert lowtide.report().replayed_ops == plan.replayed_ops
    lowtide.unfit(model)


@pytest.mark.parametrize("name", ["llama", "resnet", "vit"])
def test_a_budget_error_names_the_smallest_budget(name: str) -> None:
    model, batch = deep.build(name)
    with pytest.raises(lowtide.BudgetError, match="smallest that works") as caught:
        lowtide.plan(model, batch, "300 KiB", deadline_s=5)
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    text = str(caught.value)
    assert "What helps" in text
    assert re.search(r"\n +[\d.]+ [KM]iB  \d+ × aten\.\S+ of \S+, float32 \(\d+(, \d+)+\)", text)
    caught.value.__traceback__ = None
    printed = re.search(r"the smallest that works is ([\d.]+ MiB)", text)
    assert printed
    assert parse_budget(printed[1]) >= smallest
    plan = lowtide.plan(model, batch, f"{smallest} B", deadline_s=5)
    assert plan.predicted_peak_bytes <= smallest


@pytest.mark.parametrize("name", sorted(deep.DEEP))
def test_the_trace_accounts_for_every_byte(name: str) -> None:
    """The simulated peak of keeping everything is the measured peak of the step."""
    model, batch = deep.build(name)
    trace = profile(model, batch)
    simulated = simulate(trace, [True] * len(trace.ops)).peak_bytes
    assert abs(simulated - trace.peak_bytes) <= 0.001 * trace.peak_bytes
    assert trace.from_json(trace.to_json()) == trace


def test_the_loss_must_be_a_scalar() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(lowtide.ArgumentError, match="pass loss="):
        lowtide.plan(model, torch.randn(2, 4), "1 GiB")
    with pytest.raises(lowtide.ArgumentError, match="loss\\(output\\) is not a scalar"):
        lowtide.plan(model, torch.randn(2, 4), "1 GiB", loss=lambda out: out)
    assert lowtide.plan(model, (torch.randn(2, 4),), "1 GiB", loss=lambda out: out.sum()).replayed_ops == 0


def test_a_frontier_falls_and_is_above_its_bound(tmp_path: Path) -> None:
    model, batch = deep.build("gpt2")
    found = lowtide.frontier(model, batch, points=4, deadline_s=3)
    peaks = [p.peak_bytes for p in found.points]
    times = [p.step_s for p in found.points]
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    assert all(p.step_s >= p.bound_step_s - 1e-9 for p in found.points)
    assert found.points[-1].step_s == pytest.approx(found.plain_step_s)
    assert {p.name for p in found.baselines} >= {"every block"}
    assert "of plain" in str(found)
    figure: Any = found.plot(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 5000
    assert len(figure.axes) == 1


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_a_profile_within_a_tight_budget_is_like_a_free_one(name: str) -> None:
    """Values replayed while profiling do not count as other bytes."""
    model, batch = deep.build(name)
    plain = run_step(model, batch)
    free = profile(model, batch)
    ledger().count_everything()
    limit = ledger().live_bytes - fixed_bytes(model, batch) + int(0.5 * plain.peak_bytes)
    tight = profile(model, batch, limit_bytes=limit)
    replayed = lowtide.report().replayed_ops
    assert replayed > 0
    assert tight.fingerprint == free.fingerprint
    assert [unpack.other_bytes for unpack in tight.unpacks] == [unpack.other_bytes for unpack in free.unpacks]
    assert [op.other_bytes for op in tight.ops] == [op.other_bytes for op in free.ops]


class TwoBranches(nn.Module):
    """Backward raises in one of two branches, while the other one waits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layer(x).tanh()
        second = self.layer(x).sigmoid()
        second.register_hook(self.refuse)
        return (first + second).sum()

    def refuse(self, gradient: torch.Tensor) -> None:
        raise lowtide.BudgetError("refused", budget_bytes=1)


def test_a_step_that_is_refused_in_backward_leaves_no_memory_behind() -> None:
    model, batch = TwoBranches(), torch.randn(4096, 64)
    before = live_bytes()
    with pytest.raises(lowtide.BudgetError, match="refused"):
        profile(model, batch)
    assert live_bytes() - before < batch.nbytes
