"""Step signatures: what decides which plan applies to a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.harness.models import gpt2
from torch import nn

import lowtide
from lowtide.fitting.signature import ModelState, signature_of, sizes_of

from ..runtimes import ledger


def blocks(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(count)))


def freeze(model: nn.Sequential, frozen: bool) -> None:
    for block in list(model)[:6]:
        block.requires_grad_(not frozen)


def dropout(model: nn.Sequential, on: bool) -> None:
    for block in list(model)[:6]:
        block[2].train(on)


@pytest.mark.parametrize("change", [freeze, dropout])
def test_changed_flags_select_another_plan(change: Callable[[nn.Sequential, bool], None]) -> None:
    """A plan for frozen layers must not be followed once they are trained: they need more memory."""

    def losses(model: nn.Sequential, report: bool = False) -> list[bytes]:
        found = []
        for k, flag in enumerate([True, True, True, False, False, False, True, False]):
            torch.manual_seed(k)
            change(model, flag)
            model.zero_grad()
            loss = model(torch.randn(512, 64)).square().mean()
            loss.backward()
            found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
            if report:
                measured = lowtide.report(model).measured_peak_bytes
                assert measured is None or measured <= lowtide.report(model).budget_bytes
        return found

    plain = losses(blocks(12))
    model = blocks(12)
    ledger().count_everything()
    limit = ledger().live_bytes + 2 * sum(p.nbytes for p in model.parameters()) + 10 * 512 * 64 * 4
    lowtide.fit(model, budget=f"{limit} B")
    assert losses(model, report=True) == plain
    report = lowtide.report(model)
    assert report.step_signatures == 2
    assert report.online_steps == 2  # one profiled step for each
    lowtide.unfit(model)


def test_autocast_selects_another_plan() -> None:
    model = blocks(4)
    lowtide.fit(model, budget="1 GiB")
    x = torch.randn(32, 64)
    for enabled in (False, True, False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss: Any = model(x).float().mean()
        loss.backward()
    assert lowtide.report(model).step_signatures == 2
    assert lowtide.report(model).online_steps == 2
    lowtide.unfit(model)


def test_steps_that_hold_other_memory_while_they_are_profiled_share_plans() -> None:
    """With little memory, values are compressed before the loss of the longer steps, which run the same ops."""

    def unplanned_steps(mib: int) -> int:
        model, _ = gpt2(2, 64, 4, 64, 1024).build()
        ledger().count_everything()
        lowtide.fit(model, budget=ledger().live_bytes + mib * 2**20)
        for length in (16, 64, 56, 40, 24):
            model.zero_grad()
            ids = torch.randint(5, 1000, (4, length))
            model(input_ids=ids, labels=ids).loss.backward()
        found = lowtide.report(model).online_steps
        lowtide.unfit(model)
        return found

    assert unplanned_steps(5) == unplanned_steps(8)


def test_sizes_have_the_largest_dimensions_of_lists() -> None:
    images = [torch.zeros(3, 20, 50), torch.zeros(3, 30, 40)]
    assert sizes_of({"images": images, "labels": torch.zeros(2)}) == (3, 20, 50, 3, 30, 40, 2, 3, 30, 50)
    assert sizes_of((torch.zeros(4, 5), torch.zeros(4, 7))) == (4, 5, 4, 7)  # arguments, not a list
    assert sizes_of(([torch.zeros(4, 5), torch.zeros(4)],)) == (4, 5, 4)  # nothing that is padded together


def test_single_items_in_lists_share_a_signature() -> None:
    state = ModelState.of(nn.Linear(2, 2))

    def signature(*rows: int, is_list: bool) -> Any:
        boxes = [torch.zeros(n, 4) for n in rows]
        return signature_of(state, (), (boxes,) if is_list else tuple(boxes), {})[0]

    assert signature(3, 1, is_list=True) == signature(2, 5, is_list=True)
    assert signature(3, 1, is_list=False) != signature(2, 5, is_list=False)
    assert signature(3, 1, is_list=True) != signature(3, 1, 1, is_list=True)
