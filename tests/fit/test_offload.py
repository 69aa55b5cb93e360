"""Plans that offload to a disk: exact, within the budget, as predicted, also if the disk is slow or fails."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.memory.eviction import Pace
from lowtide.engine.runtime import current_runtime
from lowtide.planning import Link
from lowtide.stores import DiskStore
from lowtide.stores._spill_file import SpillFile
from lowtide.stores.speed import Speed, TransferCosts
from lowtide.torch_compat import start_recording_allocations, stop_recording_allocations
from tests.runtimes import ledger

from ..engine import deep
from ..engine.steps import assert_equal, run_step
from ..stores.conftest import small_file_system
from .test_fit import fitted_steps


def take_to_be_quick(store: DiskStore) -> None:
    costs = TransferCosts(0.0, 0.0, 0.0, 1e12, 1e12, 0.0, 0.0)
    current_runtime().memory().set_store_costs(store, Pace(Speed(1e12, 1e12)), costs)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    """Return a disk that is assumed to be faster than any op, so that plans use it."""
    with DiskStore(tmp_path, threads=1) as store:
        take_to_be_quick(store)
        yield store


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_file_system(tmp_path / "small", "1m")


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Add `seconds` to every write."""
    write = SpillFile.write

    def slowly(self: SpillFile, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return write(self, *args, **kwargs)

    monkeypatch.setattr(SpillFile, "write", slowly)


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_held_predicted_and_exact(name: str, disk: DiskStore) -> None:
    model, batch = deep.build(name)
    plain = run_step(model, batch)
    limit = int(0.4 * plain.peak_bytes)
    for step in fitted_steps(model, batch, limit, stores=disk):
        assert_equal(plain, step)
        assert step.peak_bytes <= limit
    report = lowtide.report(model)
    assert report.online_steps == 1
    assert report.plan is not None
    assert report.plan.offload
    assert report.plan.prefetches
    assert disk.stats().prefetch_hits > 0
    assert lowtide.report().values_offloaded > 0
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes is not None
    assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 0.03 * report.measured_peak_bytes
    assert start_recording_allocations()  # the meter of these steps has stopped its own
    stop_recording_allocations()
    assert "offloaded" in str(report.plan)
    assert report.details().predicted_peak_bytes == report.plan.predicted_peak_bytes
    lowtide.unfit(model)
    gc.collect()
    # The profiled step may also evict values of other tests, in graphs that torch never frees.
    own = {f"in module {path!r}" for path, _ in model.named_modules()}
    assert not [entry.name for entry in disk.queue.entries if any(where in entry.name for where in own)]


def test_a_disk_that_is_slower_than_expected_costs_time_only(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = deep.build("gpt2")
    plain = run_step(model, batch)
    slow_down(monkeypatch, 0.02)
    limit = int(0.4 * plain.peak_bytes)
    for step in fitted_steps(model, batch, limit, steps=3, stores=disk):
        assert_equal(plain, step)
        assert step.peak_bytes <= limit
    report = lowtide.report(model)
    assert report.plan is not None
    assert report.plan.offload
    lowtide.unfit(model)


def test_a_full_disk_is_not_used_by_later_plans(small_disk: Path) -> None:
    model, batch = deep.build("gpt2")
    plain = run_step(model, batch)
    ledger().count_everything()
    with DiskStore(small_disk, threads=1) as store, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        take_to_be_quick(store)
        limit = ledger().live_bytes + int(0.4 * plain.peak_bytes)
        plan = lowtide.plan(model, batch, f"{limit} B", stores=store, codecs=None)
        assert plan.offload
        assert plan.prefetches
        lowtide.fit(model, plan=plan, stores=store, codecs=None)
        for _ in range(4):
            assert_equal(plain, run_step(model, batch))
        report = lowtide.report(model)
        assert store.stats().fallbacks > 0
        assert any("No space left" in str(w.message) or "could not be written" in str(w.message) for w in told)
        assert report.plan is not None
        assert not report.plan.offload
        lowtide.unfit(model)


def test_a_plan_needs_its_store(disk: DiskStore) -> None:
    model, batch = deep.build("gpt2")
    ledger().count_everything()
    plain = lowtide.plan(model, batch, 2**60).plain_peak_bytes
    plan = lowtide.plan(model, batch, f"{int(0.5 * plain)} B", stores=disk)
    assert plan.offload
    with pytest.raises(lowtide.LowtideError, match=r"to the store 'disk'.*stores=\('disk',\)"):
        lowtide.fit(model, plan=plan)


def test_an_exception_in_forward_leaves_nothing_on_the_disk(disk: DiskStore) -> None:
    class Fails(nn.Module):
        fail = False

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(256, 256), nn.Tanh())))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers(x)
            if self.fail:
                raise RuntimeError("no")
            return x.square().mean()

    model, x = Fails(), torch.randn(512, 256)
    ledger().count_everything()
    plain = lowtide.plan(model, x, 2**60).plain_peak_bytes
    plan = lowtide.plan(model, x, f"{int(0.8 * plain)} B", stores=disk)
    assert plan.offload
    lowtide.fit(model, plan=plan, stores=disk, codecs=None)
    model.fail = True
    with pytest.raises(RuntimeError, match="no"):
        model(x)
    gc.collect()
    assert disk.stats().values == 0
    model.fail = False
    model(x).backward()
    assert lowtide.report().values_offloaded > 0
    gc.collect()
    assert disk.stats().values == 0
    lowtide.unfit(model)


def test_an_in_place_op_waits_for_the_write_of_its_input(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain PyTorch raises an error for this program. With an offloaded value the gradient is correct."""
    x = torch.randn(512, 256, requires_grad=True)
    expected = torch.autograd.grad(x.exp().sum(), x)[0]

    class Model(nn.Module):
        overwrites = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            loss = y.sum()
            with torch.no_grad():
                (y if self.overwrites else torch.empty_like(y)).mul_(0)
            return loss + x.sum() * 0

    model = Model()
    ledger().count_everything()
    plan = lowtide.plan(model, x, 2**60)
    exp = plan.op_names.index("aten.exp.default")
    plan = replace(plan, offload=(exp,), written_before=(len(plan.keep),), link=Link("disk", 1e9, 1e9))
    slow_down(monkeypatch, 0.3)
    for overwrites in (False, True):
        model.overwrites = overwrites
        lowtide.fit(model, plan=plan, stores=disk, codecs=None)
        x.grad = None
        model(x).backward()
        assert lowtide.report().values_offloaded == 1
        assert torch.equal(x.grad, expected)
        lowtide.unfit(model)
