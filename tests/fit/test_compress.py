"""Plans that compress values: exact with masks, close with bfloat16, within the budget, as predicted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.codecs import CODECS, costs
from lowtide.fitting.plan import profile
from lowtide.planning import CodecCost
from lowtide.records import Trace
from tests.runtimes import ledger

from ..engine import deep
from ..engine.steps import assert_close, assert_equal, run_step
from .test_fit import fitted_steps


class Gated(nn.Module):
    """Layers of which only bools are saved. Each is recomputed by two matrix products."""

    def __init__(self, layers: int = 16, size: int = 256) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.weights = [0.1 * torch.randn(size, size) for _ in range(layers)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for weight in self.weights:
            closed = (x.detach() @ weight @ weight.T).sigmoid() > 0.5
            x = x.masked_fill(closed, 0.5) * 1.1
        return x.sum()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assume codecs that are faster than any op, so that plans use them."""
    measure = costs.measure_codec_cost

    def at_once(*args: Any, **kwargs: Any) -> CodecCost | None:
        codec_cost = measure(*args, **kwargs)
        if codec_cost is None:
            return None
        return replace(
            codec_cost, compress_s=0.0, compress_s_per_byte=1e-13, decompress_s=0.0, decompress_s_per_byte=1e-13
        )

    monkeypatch.setattr(costs, "measure_codec_cost", at_once)
    yield
    measure.cache_clear()


def test_masks_are_compressed_exactly(quick: None) -> None:
    torch.manual_seed(0)
    model, batch = Gated(), (torch.randn(4096, 256),)
    plain = run_step(model, batch)
    limit = int(0.8 * plain.peak_bytes)
    for step in fitted_steps(model, batch, limit, codecs="exact"):
        assert_equal(plain, step)
        assert step.peak_bytes <= limit
    report = lowtide.report(model)
    assert report.plan is not None
    assert report.plan.compress
    assert {codec_cost.codec for codec_cost in report.plan.codec_costs} == {"mask"}
    scope = lowtide.report()
    assert scope.values_compressed >= len(report.plan.compress)  # type: ignore[union-attr]
    assert "compressed" in str(scope)
    assert "compress" in str(report.plan)
    assert "compressed" in str(report.details())
    lowtide.unfit(model)


class WithDropout(nn.Module):
    """Layers with dropout, whose scaled masks are saved, in place and out of place."""

    def __init__(self, layers: int = 4, size: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = nn.functional.dropout(layer(x).sin(), 0.1 + 0.2 * k, inplace=k % 2 == 1)
        return x.sum()


def test_dropout_masks_are_recorded_as_binary() -> None:
    torch.manual_seed(0)
    trace = profile(WithDropout(), (torch.randn(512, 256),))
    masks = [value for value in trace.values if value.binary]
    assert len({value.storage for value in masks}) == 4  # drawn, then scaled in place
    assert {value.dtype for value in masks} == {"float32"}
    saved = [trace.values[v] for v in trace.saved]
    assert sum(value.binary for value in saved) == 4
    assert Trace.from_json(trace.to_json()) == trace


def test_a_value_with_more_elements_later_is_not_binary() -> None:
    weight = nn.Parameter(torch.ones(512, 256))

    class Mixing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.empty_like(x).bernoulli_(0.5)
            mask[:100].mul_(3.0)  # a part, so three distinct elements
            other = torch.empty_like(x).bernoulli_(0.5).mul_(x)
            third = torch.empty(600, 256)
            third[:512].bernoulli_(0.5)
            return (weight * mask * other * third[:512]).sum()

    trace = profile(Mixing(), (torch.randn(512, 256),))
    binary = {trace.ops[value.made_at].name for value in trace.values if value.binary and value.made_at is not None}
    assert binary == {"aten.bernoulli_.float"}
    assert not any(trace.values[v].binary for v in trace.saved)


def test_scaled_dropout_masks_are_compressed_exactly(quick: None) -> None:
    torch.manual_seed(0)
    model, batch = WithDropout(), (torch.randn(2048, 256),)
    plain = run_step(model, batch)
    limit = int(0.85 * plain.peak_bytes)
    for step in fitted_steps(model, batch, limit, codecs="exact"):
        assert_equal(plain, step)
        assert step.peak_bytes <= limit
    report = lowtide.report(model)
    assert report.plan is not None
    assert any(report.plan.op_names[j] == "aten.div_.Scalar" for j in report.plan.compress)
    assert any(codec_cost.binary for codec_cost in report.plan.codec_costs)
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes is not None
    assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 0.03 * report.measured_peak_bytes
    lowtide.unfit(model)


@pytest.mark.parametrize("codecs", ["exact", "bf16"])
def test_a_mask_with_more_elements_than_planned_is_kept_or_gets_the_next_codec(codecs: str, quick: None) -> None:
    class Fickle(WithDropout):
        """The same ops, but one step scales its masks by a row of numbers instead of one number."""

        scale: Any = 1.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
                x = x * torch.empty_like(x).bernoulli_(0.5).mul_(self.scale)
            return x.sum()

    torch.manual_seed(0)
    model, batch = Fickle(), (torch.randn(2048, 256),)
    model.scale = torch.tensor(1.5)  # an op of the same name
    ledger().count_everything()
    plan = lowtide.plan(model, batch, 2**60)
    masks = tuple(j for j, name in enumerate(plan.op_names) if name == "aten.mul_.Tensor")
    assert len(masks) == 4
    allowed = ("mask", "bf16") if codecs == "bf16" else ("mask",)
    ways = (costs.measure_codec_cost("mask", "float32", binary=True), costs.measure_codec_cost("bf16", "float32"))
    plan = replace(
        plan,
        offload=masks,
        written_before=tuple(j + 1 for j in masks),
        compress=masks,
        codec_costs=tuple(way for way in ways if way is not None and way.codec in allowed),
    )
    lowtide.fit(model, plan=plan, codecs=allowed, budget=2**60)
    for scale, compressed in ((torch.tensor(1.5), 4), (torch.rand(256), 4 if codecs == "bf16" else 0)):
        lowtide.unfit(model)
        model.scale = scale
        plain = run_step(model, batch)
        lowtide.fit(model, plan=plan, codecs=allowed, budget=2**60)
        step = run_step(model, batch)
        (assert_equal if scale.dim() == 0 or codecs == "exact" else assert_close)(plain, step)
        assert lowtide.report().values_compressed == compressed  # type: ignore[union-attr]
    lowtide.unfit(model)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_a_lossy_codec_that_is_named(name: str, quick: None) -> None:
    model, batch = deep.build(name)
    plain = run_step(model, batch)
    limit = int(0.6 * plain.peak_bytes)
    steps = fitted_steps(model, batch, limit, codecs="bf16")
    for step in steps[1:]:  # the first is profiled
        assert_close(plain, step)
        assert step.peak_bytes <= limit
    report = lowtide.report(model)
    assert report.plan is not None
    assert report.plan.compress
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes is not None
    # Bytes that a node frees before the peak of its successors are counted too, so the prediction is an upper bound.
    assert 0.995 * report.measured_peak_bytes <= report.predicted_peak_bytes <= 1.08 * report.measured_peak_bytes
    lowtide.unfit(model)


def test_a_lossy_codec_that_is_not_named_is_never_used(quick: None) -> None:
    model, batch = deep.build("gpt2")
    ledger().count_everything()
    half = lowtide.plan(model, batch, 2**60).plain_peak_bytes // 2
    assert not any(
        codec_cost.codec in ("bf16", "fp16", "fp8", "int8")
        for codec_cost in lowtide.plan(model, batch, f"{half} B").codec_costs
    )
    assert not lowtide.plan(model, batch, f"{half} B", codecs=None).codec_costs


def test_a_plan_needs_its_codecs(quick: None, tmp_path: Path) -> None:
    model, batch = deep.build("gpt2")
    ledger().count_everything()
    half = lowtide.plan(model, batch, 2**60).plain_peak_bytes // 2
    plan = lowtide.plan(model, batch, f"{half} B", codecs="bf16")
    assert plan.compress
    plan.save(tmp_path / "plan.json")
    assert lowtide.Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(lowtide.LowtideError, match=r"compresses values with 'bf16'.*codecs="):
        lowtide.fit(model, plan=plan)
    lowtide.fit(model, plan=plan, codecs="bf16", budget=2**60)
    run_step(model, batch)
    assert lowtide.report().values_compressed > 0  # type: ignore[union-attr]
    lowtide.unfit(model)


def test_nothing_stays_after_a_step_an_exception_or_a_dropped_graph(quick: None) -> None:
    model, batch = deep.build("gpt2")
    ledger().count_everything()
    half = lowtide.plan(model, batch, 2**60).plain_peak_bytes // 2
    plan = lowtide.plan(model, batch, f"{half} B", codecs="bf16")
    lowtide.fit(model, plan=plan, codecs="bf16", budget=2**60)
    run_step(model, batch)
    model.zero_grad(set_to_none=True)
    gc.collect()
    ledger().count_everything()
    before = ledger().live_bytes

    loss = model(**batch).loss
    del loss
    gc.collect()
    assert ledger().live_bytes == before

    def fails(*_: Any) -> None:
        raise RuntimeError("in the middle")

    hook = next(iter(model.parameters())).register_hook(fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(**batch).loss.backward()
    hook.remove()
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert ledger().live_bytes == before
    lowtide.unfit(model)


@pytest.mark.parametrize("codec", ["mask", "bf16", "fp16", "fp8", "int8"])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 2**16 + 5])
@pytest.mark.parametrize("binary", [False, True])
def test_the_planned_size_is_the_size_of_the_codec(codec: str, count: int, binary: bool) -> None:
    for dtype in (torch.bool, torch.float32, torch.float64, torch.float16, torch.bfloat16):
        codec_cost = costs.measure_codec_cost(codec, str(dtype).removeprefix("torch."), binary=binary)
        content = torch.randn(count)
        encoded = CODECS[codec].encode((content > 0 if dtype is torch.bool or binary else content).to(dtype))
        if codec_cost is None or encoded is None:  # the codec does not apply if the result is not smaller
            assert (
                codec_cost is None or codec_cost.compressed_bytes(count * dtype.itemsize) + 16 >= count * dtype.itemsize
            )
            continue
        taken = sum(part.untyped_storage().nbytes() for part in encoded.parts)
        assert codec_cost.compressed_bytes(count * dtype.itemsize) == taken


def test_measuring_a_codec_draws_nothing() -> None:
    costs.measure_codec_cost.cache_clear()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert costs.measure_codec_cost("bf16", "float32") is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plan_on_the_shelf_serves_only_those_who_allow_its_codecs(quick: None, tmp_path: Path) -> None:
    def packed_steps(codecs: str | None) -> int:
        model, batch = deep.build("gpt2")
        gc.collect()
        ledger().count_everything()
        lowtide.fit(model, budget=f"{limit} B", codecs=codecs, cache=tmp_path)
        compressed = 0
        for _ in range(3):
            run_step(model, batch)
            compressed += lowtide.report().values_compressed  # type: ignore[union-attr]
        lowtide.unfit(model)
        return compressed

    model, batch = deep.build("gpt2")
    gc.collect()
    ledger().count_everything()
    limit = int(0.75 * lowtide.plan(model, batch, 2**60).plain_peak_bytes)
    del model, batch
    assert packed_steps("bf16") > 0
    assert packed_steps(None) == 0
    assert packed_steps("bf16") > 0
