"""Copies of a fitted model are fitted too, and independent of the original."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn

import lowtide
from lowtide.torch_compat import forward_pre_hooks_of

from ..runtimes import ledger

ROWS, WIDTH = 512, 64


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def train(model: nn.Module, steps: int, seed: int = 5) -> list[bytes]:
    """Return the bytes of all gradients. If the model is fitted, assert that each measured peak is in the budget."""
    torch.manual_seed(seed)
    found = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        found += [p.grad.numpy().tobytes() for p in model.parameters()]
    model.zero_grad()
    return found


def tight(copies: int) -> str:
    """Return a budget in which a step recomputes values, with memory for this number of copies beside it."""
    gc.collect()
    ledger().count_everything()
    parameters = sum(p.nbytes for p in stack().parameters())
    return f"{ledger().live_bytes + (copies + 3) * parameters + 9 * ROWS * WIDTH * 4} B"


def assert_planned(model: nn.Module, steps: int) -> None:
    report = lowtide.report(model)
    assert (report.steps, report.online_steps) == (steps, 1)
    assert report.plan is not None
    assert report.plan.recomputed
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.budget_bytes


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_a_copy_is_fitted(steps_before: int) -> None:
    plain = train(stack(), 4)
    model = stack()
    lowtide.fit(model, budget=tight(2), stores=None, codecs=None)
    train(model, steps_before)
    copied = copy.deepcopy(model)
    assert lowtide.report(copied).budget_bytes == lowtide.report(model).budget_bytes
    assert lowtide.report(copied).steps == 0
    again = copy.deepcopy(copied)
    assert train(copied, 4) == plain
    assert_planned(copied, 4)
    assert train(again, 4) == plain
    assert_planned(again, 4)
    assert lowtide.report(model).steps == steps_before
    if steps_before == 0:
        assert train(model, 4) == plain
        assert_planned(model, 4)
    for one in (model, copied, again):
        lowtide.unfit(one)
        assert not forward_pre_hooks_of(one)


def test_a_copy_that_has_not_been_called_is_fitted() -> None:
    model = nn.ModuleDict({"net": lowtide.fit(stack(), budget="1 GiB")})
    copied = copy.deepcopy(model)
    lowtide.unfit(model["net"])
    del model
    gc.collect()
    train(copied["net"], 2)
    assert lowtide.report(copied["net"]).steps == 2
    lowtide.unfit(copied["net"])


def test_unfit_of_one_leaves_the_other() -> None:
    model = lowtide.fit(stack(), budget="1 GiB")
    first, second, third = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    train(first, 2)
    lowtide.unfit(first)
    lowtide.unfit(second)  # never called
    for one in (first, second):
        assert not forward_pre_hooks_of(one)
        with pytest.raises(lowtide.ArgumentError, match="not fitted"):
            lowtide.report(one)
    lowtide.unfit(model)
    train(third, 2)
    assert lowtide.report(third).steps == 2
    lowtide.fit(third, budget="2 GiB")
    assert len(forward_pre_hooks_of(third)) == 1
    assert lowtide.report(third).budget_bytes == 2**31
    lowtide.unfit(third)


def test_hooks_in_saved_models_do_nothing() -> None:
    model = lowtide.fit(stack(), budget="1 GiB")
    plain = train(stack(), 2)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for loaded in (pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        for one in (loaded, copy.deepcopy(loaded)):
            assert train(one, 2) == plain
            with pytest.raises(lowtide.ArgumentError, match="not fitted"):
                lowtide.report(one)
    lowtide.unfit(model)
