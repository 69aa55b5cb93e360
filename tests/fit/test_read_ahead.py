"""Prefetching from the store: it starts when the plan says, and steps stay exact when something fails."""

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
    """Layers whose tanh outputs are offloaded. It can leave its plan (`other_ops`) and fail in backward."""

    other_ops = False
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
            if k == 3 and self.other_ops:
                x = x.sin()
        return x.square().mean()


def _fail(gradient: torch.Tensor) -> None:
    raise RuntimeError("hook failed")


def offload_by_name(trace: Trace, names: tuple[str, ...], *, prefetch_after: Any = None) -> Plan:
    """Return a plan that keeps all ops and offloads those with these names.

    Without `prefetch_after`, each is prefetched when the next one is fetched.
    """
    ops = [j for j, op in enumerate(trace.ops) if op.name in names]
    written_before = {j: min(len(trace.ops), trace.values[trace.ops[j].outputs[0]].held_until + 1) for j in ops}
    prefetches = prefetch_after or dict(zip(ops, [*ops[1:], -1], strict=True))
    simulated = simulate(trace, [True] * len(trace.ops), (), written_before, LINK, prefetch_after=prefetches)
    return replace(
        solve(trace, 2**60),
        offload=tuple(written_before),
        written_before=tuple(written_before.values()),
        prefetch_after=tuple(prefetches.get(j, j) for j in written_before),
        link=LINK,
        predicted_peak_bytes=simulated.peak_bytes,
    )


def fitted(store: Store) -> tuple[Layers, torch.Tensor, Plan]:
    model, x = Layers(), torch.randn(512, 256)
    ledger().count_everything()
    plan = offload_by_name(profile(model, x), ("aten.tanh.default",))
    assert len(plan.prefetches) == LAYERS
    lowtide.fit(model, plan=plan, budget=2**60, stores=store, codecs=None)
    return model, x, plan


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def expected(x: torch.Tensor, other_ops: bool = False) -> list[torch.Tensor]:
    plain = Layers()
    plain.other_ops = other_ops
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


def test_prefetches_start_when_the_plan_says() -> None:
    store = MemoryDouble()
    model, x, _ = fitted(store)
    gradients(model, x)
    store.calls.clear()
    assert_same(gradients(model, x), expected(x))
    written = [name for call, name in store.calls if call == "put"]
    assert len(written) == LAYERS
    reads = [call for call in store.calls if call[0] in ("prefetch", "fetch")]
    order = written[::-1]
    assert reads == [
        ("prefetch", order[0]),  # at the start of backward
        *(call for k in range(LAYERS - 1) for call in (("fetch", order[k]), ("prefetch", order[k + 1]))),
        ("fetch", order[-1]),
    ]
    lowtide.unfit(model)


def test_measured_and_later_steps_are_exact(disk: DiskStore) -> None:
    model, x, plan = fitted(disk)
    for _ in range(5):  # two are measured, then recording is off where possible
        hits = disk.stats().prefetch_hits
        assert_same(gradients(model, x), expected(x))
        assert disk.stats().prefetch_hits > hits  # the others were fetched before a thread read them
    report = lowtide.report(model)
    assert report.online_steps == 0
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= plan.predicted_peak_bytes + 2048
    assert disk.stats().peak_prefetched_bytes == x.nbytes
    assert_empty(disk)
    lowtide.unfit(model)


def test_a_failed_prefetch_is_read_again(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = fitted(disk)
    read, failed = SpillFile.read, []

    def fail_in_background(self: SpillFile, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            failed.append(1)
            raise DamagedValueError("prefetch failed")
        return read(self, *args)

    monkeypatch.setattr(SpillFile, "read", fail_in_background)
    assert_same(gradients(model, x), expected(x))
    assert failed
    assert_empty(disk)
    lowtide.unfit(model)


def test_a_read_that_keeps_failing_is_an_error_and_the_next_step_is_exact(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, _ = fitted(disk)
    assert_same(gradients(model, x), expected(x))  # a store that fails from the start is not used
    with monkeypatch.context() as broken:

        def fails(self: SpillFile, *args: Any) -> Any:
            raise DamagedValueError("the disk is broken")

        broken.setattr(SpillFile, "read", fails)
        with pytest.raises(DamagedValueError, match="the disk is broken"):
            gradients(model, x)
    assert_empty(disk)
    assert_same(gradients(model, x), expected(x))
    lowtide.unfit(model)


def test_an_exception_in_backward_empties_the_store(disk: DiskStore) -> None:
    model, x, _ = fitted(disk)
    model.fails_in_backward = True
    with pytest.raises(RuntimeError, match="hook failed"):
        gradients(model, x)
    model.fails_in_backward = False
    assert disk.stats().peak_prefetched_bytes > 0
    assert_empty(disk)
    assert_same(gradients(model, x), expected(x))
    lowtide.unfit(model)


def test_a_step_that_differs_from_its_plan_is_exact(disk: DiskStore) -> None:
    model, x, _ = fitted(disk)
    assert_same(gradients(model, x), expected(x))
    model.other_ops = True
    assert_same(gradients(model, x), expected(x, other_ops=True))
    assert lowtide.report(model).online_steps == 1
    assert_empty(disk)
    lowtide.unfit(model)


def test_prefetched_values_that_are_never_unpacked_are_freed_with_their_graph(disk: DiskStore) -> None:
    model, x, _ = fitted(disk)
    last_input: list[torch.Tensor] = []
    model.layers[-1].register_forward_pre_hook(lambda module, args: last_input.append(args[0]))
    loss = model(x)
    torch.autograd.grad(loss, last_input)  # the last layer only
    assert disk.stats().prefetched_bytes == x.nbytes
    del loss
    last_input.clear()
    assert_empty(disk)
    lowtide.unfit(model)


def test_a_second_backward_pass_is_exact(disk: DiskStore) -> None:
    model, x, _ = fitted(disk)
    loss = model(x)
    loss.backward(retain_graph=True)
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert_same([p.grad for p in model.parameters() if p.grad is not None], expected(x))
    del loss
    assert_empty(disk)
    lowtide.unfit(model)


def test_values_larger_than_the_prefetch_limit_are_fetched(tmp_path: Path) -> None:
    """A value that exceeds `max_prefetch_bytes` is read when it is needed."""
    with DiskStore(tmp_path, max_prefetch_bytes=1000) as store:
        model, x, _ = fitted(store)
        assert_same(gradients(model, x), expected(x))
        assert store.stats().prefetch_hits == 0
        assert store.stats().peak_prefetched_bytes == 0
        assert_empty(store)
        lowtide.unfit(model)


def test_prefetched_bytes_are_counted_inside_ops_that_are_not_recorded(disk: DiskStore) -> None:
    """Recording is off in the backward formula of `cdist`. Its fetch starts a large prefetch."""
    live_bytes: list[int] = []

    class Distances(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            large = torch.tanh(x).repeat(64, 1).sigmoid()
            a, b = (x + large.mean()).exp(), y.exp()
            a.register_hook(lambda gradient: live_bytes.append(ledger().live_bytes))
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
    for event in (large, first, second):  # no prefetch, and prefetch after each value that the formula unpacks
        plan = offload_by_name(trace, ("aten.exp.default", "aten.sigmoid.default"), prefetch_after={large: event})
        x.grad = y.grad = None
        lowtide.fit(model, plan=plan, budget=2**60, stores=disk, codecs=None)
        live_bytes.clear()
        model(x, y).backward()
        assert lowtide.report(model).measured_peak_bytes is not None
        live[event] = live_bytes[0]
        lowtide.unfit(model)
    assert live[first] == live[second] == live[large] + nbytes
