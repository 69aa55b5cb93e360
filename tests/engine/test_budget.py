"""The online budget is exact, stays within the limit in forward and backward, and leaves no state."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide._units import format_budget
from lowtide.codecs import chooser
from lowtide.codecs.chooser import shared_chooser
from lowtide.engine.memory import eviction
from lowtide.engine.memory.ledger import Ledger
from lowtide.engine.runtime import current_runtime
from lowtide.stores import DiskStore, MemoryDouble
from tests.runtimes import current_recorder, ledger, pool

from . import deep, zoo
from .budgets import above, fixed_bytes, nothing_evictable_left, random_eviction, step_within
from .steps import assert_equal, run_step

SHARES = (0.8, 0.6, 0.4, 0.3)
DROP_ONLY: dict[str, Any] = {"stores": None, "codecs": None}


@pytest.mark.parametrize("name", sorted(deep.DEEP))
def test_the_peak_stays_within_every_budget(name: str) -> None:
    model, batch = deep.build(name)
    plain = run_step(model, batch)
    for share in SHARES:
        ours, limit = step_within(model, batch, plain, share, **DROP_ONLY)
        assert_equal(plain, ours)
        assert ours.peak_bytes <= limit, f"at {share:.0%}"
        report = lowtide.report().budget
        assert report is not None
        assert report.values_dropped > 0
        assert lowtide.report().replayed_ops > 0
    assert nothing_evictable_left()


@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_every_architecture_is_exact_under_random_eviction(name: str) -> None:
    model, batch = zoo.build(name)
    plain = run_step(model, batch)
    ours = run_step(model, batch, random_eviction(5, 0.3, **DROP_ONLY))
    assert_equal(plain, ours)
    report = lowtide.report().budget
    assert report is not None
    assert report.values_dropped > 0


class Mixed(nn.Module):
    """Batch norm, dropout, in-place activations, a recurrent layer, and a shape that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.head = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu_(self.norm(self.conv(x)))
        y = nn.functional.dropout(y, 0.2)
        y, _ = self.lstm(y.transpose(1, 2))
        chosen = y[y.sum(-1) > 0]
        y = self.head(chosen)
        y[:, 0].mul_(2)
        return y.square().sum()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "options",
    [DROP_ONLY, {"stores": "memory", "codecs": None}, {"stores": None, "codecs": "exact"}, {"stores": "disk"}],
    ids=["drop", "memory", "codecs", "disk"],
)
def test_state_randomness_and_writes(inside: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Mixed()
    batch = (torch.randn(16, 8, 40),)
    plain = run_step(model, batch, loss=lambda m, b: m(*b))
    if options.get("stores") == "memory":
        options = {**options, "stores": MemoryDouble()}
    for seed in range(3):
        ours = run_step(model, batch, random_eviction(seed, **options), loss=lambda m, b: m(*b), backward_inside=inside)
        assert_equal(plain, ours)


def stack(depth: int = 12, width: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())))


def test_shapes_and_control_flow_may_change_from_step_to_step() -> None:
    model = stack()
    for rows in (1024, 700, 1200, 1024):
        batch = (torch.randn(rows, 256),)
        plain = run_step(model, batch)
        ours, limit = step_within(model, batch, plain, 0.5, **DROP_ONLY)
        assert_equal(plain, ours)
        assert ours.peak_bytes <= limit


def test_an_ample_budget_evicts_nothing() -> None:
    model = stack()
    batch = (torch.randn(512, 256),)
    plain = run_step(model, batch)
    ours, _ = step_within(model, batch, plain, 2.0)
    assert_equal(plain, ours)
    report = lowtide.report()
    assert report.budget is not None
    assert report.replayed_ops == report.budget.values_dropped == report.budget.values_compressed == 0
    assert "budget" in str(report)


def test_accumulation_over_several_scopes_is_within_the_budget() -> None:
    """Forwards of three scopes before the first backward: they evict each other's values."""
    model = stack()
    batches = [(torch.randn(256, 256),) for _ in range(3)]

    def loss(m: nn.Module, scope: Any) -> torch.Tensor:
        losses = []
        for one in batches:
            with scope():
                losses.append(m(*one).square().mean())
        return torch.stack(losses).sum()

    plain = run_step(model, batches, loss=lambda m, b: loss(m, contextlib.nullcontext))
    fixed = fixed_bytes(model, batches)
    first = above((plain.peak_bytes - fixed) // 2, **DROP_ONLY)
    scopes = iter([first])

    def scope() -> Any:
        return next(scopes, None) or lowtide.budget(f"{first.limit_bytes} B", **DROP_ONLY)

    ours = run_step(model, batches, loss=lambda m, b: loss(m, scope))
    assert_equal(plain, ours)
    assert ours.peak_bytes <= fixed + first.more


def test_a_budget_error_lists_the_holders_of_memory() -> None:
    model = stack()
    x = torch.randn(512, 256)
    scope = above(4 * 2**20)
    held = [x]

    def hold_every_output() -> None:
        for layer in model:
            held.append(layer(held[-1]))

    with pytest.raises(lowtide.BudgetError, match="parameters, gradients, data") as caught, scope:
        hold_every_output()
    text = str(caught.value)
    assert caught.value.budget_bytes == scope.limit_bytes
    assert "aten." in text
    assert "smaller batch" in text
    assert "float32 tensor of shape (512, 256)" in text
    assert "lowtide.plan(model, batch, budget) names a budget that works" in text
    at_least = caught.value.at_least_bytes
    assert at_least is not None
    assert scope.limit_bytes < at_least
    assert f"at least {format_budget(at_least)} is needed" in text
    held.clear()
    del caught
    assert nothing_evictable_left()


def test_a_budget_below_the_live_bytes_raises_when_it_opens() -> None:
    held = torch.zeros(2**18)
    ledger().count(held)
    with pytest.raises(lowtide.BudgetError, match="already use"), lowtide.budget(f"{held.nbytes // 2} B"):
        raise AssertionError("not reached")
    assert current_recorder() is None


def test_a_budget_needs_a_unit_and_must_be_outermost() -> None:
    with pytest.raises(lowtide.ArgumentError):
        lowtide.budget(0.5)  # type: ignore[arg-type]
    with (
        pytest.raises(lowtide.ArgumentError, match="put it around"),
        lowtide.saving(lowtide.KeepAll()),
        lowtide.budget("1 GiB"),
    ):
        pass
    with pytest.raises(lowtide.ArgumentError, match="is not a store"):
        lowtide.budget("1 GiB", stores=("tape",))


def test_rules_inside_a_budget_decide_for_themselves() -> None:
    model = stack(6)
    batch = (torch.randn(128, 256),)

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        y = b[0]
        with lowtide.saving(lowtide.KeepNone()):
            y = m[:6](y)
        with lowtide.saving(lowtide.KeepAll()):
            y = m[6:](y)
        return lowtide.checkpoint(lambda t: t.sin().square(), y).mean()

    plain = run_step(model, batch, loss=loss)
    assert_equal(plain, run_step(model, batch, random_eviction(1, **DROP_ONLY), loss=loss))


def test_with_grad_disabled_nothing_is_recorded() -> None:
    model = stack(2)
    with torch.no_grad(), lowtide.budget("1 GiB"):
        model(torch.randn(2, 256))
        assert current_recorder() is None


def test_no_state_remains() -> None:
    gc.collect()
    current_runtime().backward.end_if_done()  # of other tests
    model = stack(4)
    refs = []
    for module in model:
        module.register_forward_hook(lambda m, a, out: refs.append(weakref.ref(out.untyped_storage())))
    with lowtide.budget("1 TiB", **DROP_ONLY):  # nothing is evicted, so values remain for backward
        loss = model(torch.randn(64, 256)).sum()
    assert (
        current_runtime().backward.is_watching
    )  # backward is wrapped; models that other tests have fitted may wrap it too
    loss.backward()
    del loss
    gc.collect()
    assert nothing_evictable_left()
    current_runtime().backward.end_if_done()
    assert not current_runtime().backward.is_watching
    assert [r for r in refs if r() is not None] == []


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_state_remains_after_an_exception(where: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise OSError("as planned")
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            raise OSError("as planned")

    model = stack(4)
    store = DiskStore()

    def step() -> None:
        with random_eviction(2, stores=store, codecs=None):
            loss = model[4:](Fails.apply(model[:4](torch.randn(64, 256)))).sum()
        loss.backward()

    with pytest.raises(OSError, match="as planned"):
        step()
    gc.collect()
    assert nothing_evictable_left()
    store.flush()
    assert store.stats().values == 0
    store.close()
    batch = (torch.randn(64, 256),)
    assert_equal(run_step(model, batch), run_step(model, batch, random_eviction(3, **DROP_ONLY)))


def test_optimizer_state_counts() -> None:
    model = stack(4)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(8, 256)
    with lowtide.budget("1 GiB"):
        loss = model(x).sum()
    loss.backward()
    optimizer.step()
    gc.collect()
    before = ledger().live_bytes
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert state >= 2 * sum(p.nbytes for p in model.parameters())
    optimizer.state.clear()
    gc.collect()
    assert before - ledger().live_bytes == state


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_a_disk_helps_to_stay_within_the_budget(name: str) -> None:
    """Also while values are written, and when an op needs the memory of prefetched values."""
    model, batch = deep.build(name)
    plain = run_step(model, batch)
    with DiskStore() as store:
        moved = 0
        for share in (0.6, 0.4, 0.3, 0.3):  # the budget measures how much of the disk time is hidden
            ours, limit = step_within(model, batch, plain, share, stores=store, codecs=None)
            assert_equal(plain, ours)
            assert ours.peak_bytes <= limit, f"at {share:.0%}"
            report = lowtide.report().budget
            assert report is not None
            moved += report.values_fetched
        assert moved > 0
        assert nothing_evictable_left()
        store.flush()
        assert store.stats().values == 0


def test_the_value_unpacked_last_is_evicted_first() -> None:
    """Equal layers have equal costs, so only the time until the unpack differs: no value is recomputed twice."""
    model = stack(16)
    batch = (torch.randn(1024, 256),)
    plain = run_step(model, batch)
    ours, limit = step_within(model, batch, plain, 0.5, **DROP_ONLY)
    assert_equal(plain, ours)
    assert ours.peak_bytes <= limit
    assert 0 < lowtide.report().replayed_ops <= lowtide.report().ops


@pytest.mark.parametrize(
    "heuristic",
    [
        eviction.Heuristic(wait="since use", unsaved_share=1.0),
        eviction.Heuristic(neighbours=False),
        eviction.Heuristic(cost=False),
    ],
    ids=["h-DTR", "own cost", "least recently used"],
)
def test_any_heuristic_is_exact_and_within_the_budget(
    heuristic: eviction.Heuristic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool(), "heuristic", heuristic)
    model = stack()
    batch = (torch.randn(2048, 256),)
    plain = run_step(model, batch)
    ours, limit = step_within(model, batch, plain, 0.4, **DROP_ONLY)
    assert_equal(plain, ours)
    assert ours.peak_bytes <= limit


def test_scopes_with_different_stores_evict_each_others_values() -> None:
    """A value on one disk, or being written to it, is evicted by a budget with another store or without one."""
    model = stack(8)
    batches = [(torch.randn(512, 256),) for _ in range(3)]

    def loss(m: nn.Module, scopes: list[Any]) -> torch.Tensor:
        total = []
        for one, scope in zip(batches, scopes, strict=True):
            with scope:
                total.append(m(*one).square().mean())
        return torch.stack(total).sum()

    plain = run_step(model, batches, loss=lambda m, b: loss(m, [contextlib.nullcontext()] * 3))
    with DiskStore() as first, DiskStore() as second:
        scopes = [
            random_eviction(1, stores=first, codecs=None),
            random_eviction(2, stores=second, codecs=None),
            random_eviction(3, **DROP_ONLY),
        ]
        assert_equal(plain, run_step(model, batches, loss=lambda m, b: loss(m, scopes)))
    more = (plain.peak_bytes - fixed_bytes(model, batches)) // 2
    with DiskStore() as first, DiskStore() as second:
        scopes = [above(more, stores=first, codecs=None), above(more, stores=second, codecs=None)]
        scopes.append(contextlib.nullcontext())
        ours = run_step(model, batches, loss=lambda m, b: loss(m, scopes))
        assert_equal(plain, ours)


def test_a_tensor_whose_is_leaf_raises_is_counted() -> None:
    """`is_leaf` of a view raises if the base was written in place."""
    base = torch.ones(6, requires_grad=True) * 2
    first, _ = base.split([3, 3])
    base.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        assert first.is_leaf
    Ledger().count_everything()
    with lowtide.budget("1 GiB"):
        torch.ones(3, requires_grad=True).sin().sum().backward()


def test_codec_measurements_are_shared_by_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring codecs again in every step would take longer than the step."""
    model, batch = deep.build("gpt2")
    plain = run_step(model, batch)
    shared = shared_chooser("exact")
    assert shared is not None
    shared.clear()  # measurements of other tests
    measured = []
    measure = chooser.measure
    monkeypatch.setattr(chooser, "measure", lambda *args: measured.append(args) or measure(*args))
    counts = []
    for _ in range(3):
        step_within(model, batch, plain, 0.5, stores=None)
        counts.append(len(measured))
    assert counts[0] > 0
    # Evictions depend on measured times, so a category may occur in a later step for the first time.
    assert counts[2] - counts[0] < counts[0]
