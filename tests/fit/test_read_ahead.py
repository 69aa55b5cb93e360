"""Values that are read from the store before backward needs them: when the plan says so, and whatever goes wrong."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.fitting.plan import profile
from lowtide.planning import Link, Plan, simulate, solve
from lowtide.records import Trace
from lowtide.stores import DamagedValueError, DiskStore, MemoryDouble, Store
from lowtide.stores._spill_file import SpillFile
from tests.runtimes import ledger

LINK = Link("disk", 1e9, 1e9)
LAYERS = 5


class Layers(nn.Module):
    """Some layers whose tanh's are offloaded; it can go another way, and fail on its way back."""

    other_way = False
    fails_in_backward = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if k == 1 and self.fails_in_backward:
                x.register_hook(_fail)
            if k == 3 and self.other_way:
                x = x.sin()
        return x.square().mean()


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("no")


def by_name(trace: Trace, names: tuple[str, ...], *, prefetch_after: Any = None) -> Plan:
    """A plan that keeps everything, and what these ops make on the disk; each is read when the one after it is."""
    ops = [j for j, op in enumerate(trace.ops) if op.name in names]
    written_before = {j: min(len(trace.ops), trace.values[trace.ops[j].outputs[0]].held_until + 1) for j in ops}
    reads = prefetch_after or dict(zip(ops, [*ops[1:], -1], strict=True))
    simulated = simulate(trace, [True] * len(trace.ops), (), written_before, LINK, prefetch_after=reads)
    return replace(
        solve(trace, 2**60),
        offload=tuple(written_before),
        written_before=tuple(written_before.values()),
        prefetch_after=tuple(reads.get(j, j) for j in written_before),
        link=LINK,
        predicted_peak_bytes=simulated.peak_bytes,
    )


def fitted(store: Store) -> tuple[Layers, torch.Tensor, Plan]:
    model, x = Layers(), torch.randn(512, 256)
    ledger().count_everything()
    plan = by_name(profile(model, x), ("aten.tanh.default",))
    assert len(plan.prefetches) == LAYERS
    lowtide.fit(model, plan=plan, budget=2**60, stores=store, codecs=None)
    return model, x, plan


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def expected(x: torch.Tensor, other_way: bool = False) -> list[torch.Tensor]:
    plain = Layers()
    plain.other_way = other_way
    return gradients(plain, x)


def assert_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert some
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def assert_empty(store: Store) -> None:
    gc.collect()
    stats = store.stats()
    assert (stats.values, stats.prefetched_bytes, stats.resident_bytes) == (0, 0, 0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore(tmp_path, threads=1) as store:
        yield store


def test_reads_begin_when_the_plan_says() -> None:
    store = MemoryDouble()
    model, x, _ = fitted(store)
    gradients(model, x)
    store.calls.clear()
    assert_same(gradients(model, x), expected(x))
    written = [name for call, name in store.calls if call == "put"]
    assert len(written) == LAYERS
    back = [call for call in store.calls if call[0] in ("prefetch", "fetch")]
    order = written[::-1]
    assert back == [
        ("prefetch", order[0]),  # when backward begins
        *(call for k in range(LAYERS - 1) for call in (("fetch", order[k]), ("prefetch", order[k + 1]))),
        ("fetch", order[-1]),
    ]
    lowtide.unfit(model)


def test_steps_are_exact_with_and_without_a_gauge(disk: DiskStore) -> None:
    model, x, plan = fitted(disk)
    for _ in range(5):  # two are measured, then the recorder sleeps where it can
        hits = disk.stats().prefetch_hits
        assert_same(gradients(model, x), expected(x))
        assert disk.stats().prefetch_hits > hits  # the others were fetched before a thread had come to them
    report = lowtide.report(model)
    assert report.online_steps == 0
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= plan.predicted_peak_bytes + 2048
    assert disk.stats().peak_prefetched_bytes == x.nbytes
    assert_empty(disk)
    lowtide.unfit(model)


def test_a_read_ahead_that_fails_is_read_again(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = fitted(disk)
    read, failed = SpillFile.read, []

    def fails_in_the_background(self: SpillFile, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            failed.append(1)
            raise DamagedValueError("not this time")
        return read(self, *args)

    monkeypatch.setattr(SpillFile, "read", fails_in_the_background)
    assert_same(gradients(model, x), expected(x))
    assert failed
    assert_empty(disk)
    lowtide.unfit(model)


def test_a_read_that_keeps_failing_is_an_error_and_the_next_step_is_right(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, _ = fitted(disk)
    assert_same(gradients(model, x), expected(x))  # with a disk that works, or it would not be used
    with monkeypatch.context() as broken:

        def fails(self: SpillFile, *args: Any) -> Any:
            raise DamagedValueError("the disk is broken")

        broken.setattr(SpillFile, "read", fails)
        with pytest.raises(DamagedValueError, match="the disk is broken"):
            gradients(model, x)
    assert_empty(disk)
    assert_same(gradients(model, x), expected(x))
    lowtide.unfit(model)


def test_an_exception_in_backward_leaves_nothing(disk: DiskStore) -> None:
    model, x, _ = fitted(disk)
    model.fails_in_backward = True
    with pytest.raises(RuntimeError, match="no"):
        gradients(model, x)
    model.fails_in_backward = False
    assert disk.stats().peak_prefetched_bytes > 0
    assert_empty(disk)
    assert_same(gradients(model, x), expected(x))
    lowtide.unfit(model)


def test_a_step_that_leaves_its_plan_is_right(disk: DiskStore) -> None:
    model, x, _ = fitted(disk)
    assert_same(gradients(model, x), expected(x))
    model.other_way = True
    assert_same(gradients(model, x), expected(x, other_way=True))
    assert lowtide.report(model).online_steps == 1
    assert_empty(disk)
    lowtide.unfit(model)


def test_what_is_read_ahead_and_never_asked_for_goes_with_its_graph(disk: DiskStore) -> None:
    model, x, _ = fitted(disk)
    before: list[torch.Tensor] = []
    model.layers[-1].register_forward_pre_hook(lambda module, args: before.append(args[0]))
    loss = model(x)
    torch.autograd.grad(loss, before)  # the last layer only
    assert disk.stats().prefetched_bytes == x.nbytes
    del loss
    before.clear()
    assert_empty(disk)
    lowtide.unfit(model)


def test_a_second_backward_pass_finds_everything(disk: DiskStore) -> None:
    model, x, _ = fitted(disk)
    loss = model(x)
    loss.backward(retain_graph=True)
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert_same([p.grad for p in model.parameters() if p.grad is not None], expected(x))
    del loss
    assert_empty(disk)
    lowtide.unfit(model)


def test_a_store_that_reads_little_ahead_is_enough(tmp_path: Path) -> None:
    """What does not fit into what the store reads ahead is read when it is needed."""
    with DiskStore(tmp_path, max_prefetch_bytes=1000) as store:
        model, x, _ = fitted(store)
        assert_same(gradients(model, x), expected(x))
        assert store.stats().prefetch_hits == 0
        assert store.stats().peak_prefetched_bytes == 0
        assert_empty(store)
        lowtide.unfit(model)


def test_its_memory_is_counted_also_where_a_formula_is_left_alone(disk: DiskStore) -> None:
    """No mode of ours is active while some formulas run; one of them fetches what begins a large read."""
    seen: list[int] = []

    class Distances(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            large = torch.tanh(x).repeat(64, 1).sigmoid()
            a, b = (x + large.mean()).exp(), y.exp()
            a.register_hook(lambda gradient: seen.append(ledger().live_bytes))
            return torch.cdist(a, b, p=3.0).sum()

    model = Distances()
    x, y = torch.randn(256, 64, requires_grad=True), torch.randn(256, 64, requires_grad=True)
    ledger().count_everything()
    trace = profile(model, (x, y))
    names = [op.name for op in trace.ops]
    first, second = (j for j, name in enumerate(names) if name == "aten.exp.default")
    large = names.index("aten.sigmoid.default")
    nbytes = trace.values[trace.ops[large].outputs[0]].nbytes
    live = {}
    for event in (large, first, second):  # not ahead, and after each of those that the formula asks for
        plan = by_name(trace, ("aten.exp.default", "aten.sigmoid.default"), prefetch_after={large: event})
        x.grad = y.grad = None
        lowtide.fit(model, plan=plan, budget=2**60, stores=disk, codecs=None)
        seen.clear()
        model(x, y).backward()
        assert lowtide.report(model).measured_peak_bytes is not None
        live[event] = seen[0]
        lowtide.unfit(model)
    assert live[first] == live[second] == live[large] + nbytes
