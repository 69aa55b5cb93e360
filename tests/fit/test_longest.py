"""`longest` finds the longest size that fits, from profiles of small sizes."""

from __future__ import annotations

import gc
import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

import lowtide
from lowtide.engine.runtime import fresh_runtime
from lowtide.fitting.plan import profile
from lowtide.planning import is_feasible
from tests.allocator import allocator_peak, live_bytes
from tests.runtimes import ledger

from ..engine.budgets import fixed_bytes
from ..engine.steps import loss_of
from ..engine.zoo import IDS, VOCABULARY, tokens
from .test_allocator_peak import Run
from .test_plan import state

Sized = tuple[nn.Module, Callable[[int], Any], tuple[int, int]]


def gpt2() -> Sized:
    config = T.GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=512, **IDS)

    def batch(length: int) -> dict[str, torch.Tensor]:
        ids = tokens(4, length)
        return {"input_ids": ids, "labels": ids}

    return T.GPT2LMHeadModel(config), batch, (16, 512)


def conv_net() -> Sized:
    widths = [3, *[16] * 6]
    blocks = [
        part
        for a, b in itertools.pairwise(widths)
        for part in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
    ]
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    return nn.Sequential(*blocks, *head), lambda side: (torch.randn(4, 3, side, side),), (16, 256)


def strided_net() -> Sized:
    config = T.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64], depths=[3, 3, 2], num_labels=4)

    def batch(side: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(4, 3, side, side), "labels": torch.arange(4)}

    return T.ResNetForImageClassification(config), batch, (32, 512)


def perceptron() -> Sized:
    layers = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers), lambda rows: (torch.randn(rows, 64),), (32, 4096)


MODELS = {"gpt2": gpt2, "conv_net": conv_net, "strided_net": strided_net, "perceptron": perceptron}


def live_bytes_besides(model: nn.Module) -> int:
    gc.collect()
    ledger().count_everything()
    return ledger().live_bytes - fixed_bytes(model, None)


@pytest.fixture
def runtime() -> Iterator[None]:
    with fresh_runtime():
        live_bytes()  # count from now on
        torch.manual_seed(0)
        yield


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_longest_size_trains_within_the_budget_and_a_larger_one_does_not_fit(name: str) -> None:
    model, batch, (smallest, largest) = MODELS[name]()
    model.train()
    middle = batch((smallest + largest) // 2)
    limit = int(0.4 * profile(model, middle, loss=loss_of).peak_bytes)
    del middle
    gc.collect()
    budget = limit + live_bytes_besides(model)
    with allocator_peak() as peak:
        found = lowtide.longest(
            model, batch, budget, (smallest, largest), loss=loss_of, stores=None, codecs=None, deadline_s=3
        )
    assert fixed_bytes(model, None) + peak.rise_bytes <= limit  # the search is within the budget too
    assert smallest < found.size < largest
    assert max(found.profiled) <= found.size
    assert found.plan.predicted_peak_bytes <= budget
    too_large = math.ceil(1.1 * found.size)
    with pytest.raises(lowtide.BudgetError, match="cannot be met"):
        lowtide.plan(model, batch(too_large), budget, loss=loss_of, stores=None, codecs=None, deadline_s=3)
    run = Run(lambda: (model, batch(found.size)))
    lowtide.fit(model, budget=limit + run.other_bytes(), plan=found.plan, stores=None, codecs=None)
    assert max(run.budgeted_steps()) <= limit
    assert lowtide.report(model).online_steps == 0
    lowtide.unfit(model)


def test_nothing_changes() -> None:
    model, batch, sizes = perceptron()
    model.eval()
    before = state(model)
    lowtide.longest(model, batch, "1 GiB", sizes, loss=loss_of)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))


def test_the_result_says_what_fits() -> None:
    model, batch, _ = perceptron()
    budget = profile(model, batch(512), loss=loss_of).peak_bytes
    found = lowtide.longest(model, batch, budget, range(64, 4097, 32), loss=loss_of, deadline_s=2)
    assert found.size >= 480
    assert found.size % 32 == 0
    *fitting, refused = found.predictions
    assert [p.size for p in fitting] == [*(64 * 2**k for k in range(len(fitting) - 1)), found.size]
    assert all(p.fits and p.peak_bytes <= budget for p in fitting)
    assert refused.size == found.size + 32
    assert not refused.fits
    assert fitting[0].plain_peak_bytes < fitting[-1].plain_peak_bytes < refused.plain_peak_bytes
    lines = str(found).splitlines()
    assert lines[0].split("  ")[-4:] == ["plain peak", "predicted peak", "step time", "overhead"]
    assert lines[len(fitting) + 1].split()[0] == f"{refused.size:,}"
    assert lines[len(fitting) + 1].endswith("does not fit")
    assert f": {found.size:,}" in lines[-2]
    assert lines[-1] == "predicted from profiles of size 64 and 128"
    assert f"longest length that fits into {lowtide._units.format_bytes(budget)}" in found.table("length")
    assert found.details().predicted_peak_bytes == found.plan.predicted_peak_bytes
    document = json.loads(found.to_json())
    assert (document["size"], document["budget_bytes"], document["fits"]) == (found.size, budget, True)
    assert lowtide.Plan.from_json(json.dumps(document["plan"])) == found.plan


def test_all_sizes_fit() -> None:
    model, batch, _ = perceptron()
    found = lowtide.longest(model, batch, "1 GiB", (32, 100), loss=loss_of)
    assert found.size == 100
    assert found.predictions[-1].fits
    assert "100; a larger size was not tried" in str(found)
    assert lowtide.longest(model, batch, "1 GiB", (32, 32), loss=loss_of).size == 32


def test_the_smallest_size_does_not_fit() -> None:
    model, batch, sizes = perceptron()
    with pytest.raises(lowtide.BudgetError, match="the smallest that works is") as caught:
        lowtide.longest(model, batch, "100 KiB", sizes, loss=loss_of)
    needed = caught.value.smallest_bytes
    assert needed is not None
    assert lowtide.longest(model, batch, f"{needed} B", sizes, loss=loss_of, deadline_s=2).size >= 32


@pytest.mark.parametrize("sizes", [(128, 64), (0, 8), (-3, 8), (8,), (8, 16, 24), (8.0, 16), range(5, 5), "8..16", 8])
def test_sizes_must_be_a_range(sizes: Any) -> None:
    model, batch, _ = perceptron()
    with pytest.raises(lowtide.ArgumentError, match="size"):
        lowtide.longest(model, batch, "1 GiB", sizes, loss=loss_of)
    with pytest.raises(lowtide.ArgumentError, match="size"):
        lowtide.frontier(model, batch, sizes=sizes, loss=loss_of)


def test_a_range_may_fall() -> None:
    model, batch, _ = perceptron()
    assert lowtide.longest(model, batch, "1 GiB", range(96, 31, -32), loss=loss_of).size == 96


def test_the_batch_must_depend_on_the_size() -> None:
    model, batch, sizes = perceptron()
    with pytest.raises(lowtide.ArgumentError, match="sizes 32 and 64 have the same shapes"):
        lowtide.longest(model, lambda size: batch(8), "1 GiB", sizes, loss=loss_of)


class Chunked(nn.Module):
    """Runs other ops for more than 40 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.layer(chunk).tanh() for chunk in x.split(40)])


def test_sizes_with_other_ops_are_refused() -> None:
    with pytest.raises(lowtide.ArgumentError, match=r"runs other ops at size 64 than at size 32.*larger size than 32"):
        lowtide.longest(Chunked(), lambda rows: torch.randn(rows, 64), "1 GiB", (32, 512), loss=loss_of)


def test_batches_of_all_sizes_need_the_same_tensors() -> None:
    model, batch, sizes = perceptron()

    def other_batch(rows: int) -> Any:
        return batch(rows) if rows < 100 else (batch(rows), batch(rows))

    with pytest.raises(
        lowtide.ArgumentError, match="batch of size 4096 has 4 dimensions in total, and that of size 32"
    ):
        lowtide.longest(model, other_batch, "1 GiB", sizes, loss=loss_of)


def test_the_frontier_of_the_largest_size() -> None:
    model, batch, _ = gpt2()
    model.train()
    true = lowtide.frontier(model, batch(200), points=3, deadline_s=2)
    found = lowtide.frontier(model, batch, points=3, sizes=(16, 200), deadline_s=2)
    assert found.plain_peak_bytes == pytest.approx(true.plain_peak_bytes, rel=0.01)
    assert found.points[0].peak_bytes == pytest.approx(true.points[0].peak_bytes, rel=0.02)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 1.0])
def test_a_size_is_feasible_if_it_has_a_plan(share: float) -> None:
    model, batch, _ = conv_net()
    trace = profile(model.train(), batch(48), loss=loss_of)
    budget = int(share * trace.peak_bytes)
    try:
        lowtide.planning.solve(trace, budget, deadline_s=10)
    except lowtide.BudgetError:
        assert not is_feasible(trace, budget)
    else:
        assert is_feasible(trace, budget)
