"""Policies on small programs: kept and recomputed values are counted by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import lowtide
from lowtide.engine.ops import timing
from lowtide.engine.recording.layers import layers_of, repeated_blocks

K, R = lowtide.Decision.KEEP, lowtide.Decision.RECOMPUTE


def decisions(policy: Any, forward: Any) -> list[tuple[str, str, int | None]]:
    """Return the `OpInfo` of each call of `decide`, in order."""
    seen: list[Any] = []

    class Spy(lowtide.Policy):
        needs_layers = True
        layers = policy.layers

        def decide(self, op: lowtide.OpInfo) -> lowtide.Decision:
            seen.append(op)
            return policy.decide(op)

        def keeps_input_of(self, layer: int) -> bool:
            return policy.keeps_input_of(layer)

    with lowtide.saving(Spy()):
        forward()
    return seen


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Stack(nn.Module):
    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(n))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_ops_have_their_module_and_layer() -> None:
    model = Stack(2)
    x = torch.randn(5, 3)
    ops = decisions(lowtide.EveryN(1), lambda: model(x).sum())
    assert [(o.name, o.module, o.layer) for o in ops] == [
        ("aten.addmm.default", "embed", None),
        ("aten.native_layer_norm.default", "blocks.0.norm", 0),
        ("aten.addmm.default", "blocks.0.linear", 0),
        ("aten.tanh.default", "blocks.0", 0),
        ("aten.add.Tensor", "blocks.0", 0),
        ("aten.native_layer_norm.default", "blocks.1.norm", 1),
        ("aten.addmm.default", "blocks.1.linear", 1),
        ("aten.tanh.default", "blocks.1", 1),
        ("aten.add.Tensor", "blocks.1", 1),
        ("aten.addmm.default", "head", None),
        ("aten.sum.default", "", None),
    ]
    assert [o.index for o in ops] == list(range(11))
    assert [o.outside_layers for o in ops] == [True] + [False] * 8 + [True] * 2
    assert ops[0].output_bytes == 5 * 8 * 4


@pytest.mark.parametrize(("n", "kept_boundaries"), [(1, 4), (2, 2), (3, 2), (4, 1), (9, 1)])
def test_every_n_keeps_the_input_of_every_nth_layer(n: int, kept_boundaries: int) -> None:
    model = Stack(4)
    x = torch.randn(5, 3)
    with lowtide.saving(lowtide.EveryN(n)):
        loss = model(x).sum()
    report = lowtide.report()
    assert report.layers == 4
    # Autograd saves per layer: input and 2 statistics of norm, input of linear, output of tanh. Also the input of head.
    # Kept: the inputs of layers 0, n, 2n, … that norm saves, and the input of head, which is outside the layers.
    assert report.values_kept == kept_boundaries + 1
    assert report.values_recomputed == 4 * 5 - kept_boundaries
    loss.backward()


def test_a_layers_input_that_was_saved_before_counts_as_kept() -> None:
    """tanh saves its output inside layer 0. Later this value is the input of layer 1."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    x = torch.randn(4, 8)
    with lowtide.saving(lowtide.EveryN(1)):
        loss = model(x).square().sum()
    report = lowtide.report()
    assert (report.values_kept, report.values_recomputed) == (3, 0)
    assert report.bytes_kept == 3 * 4 * 8 * 4
    loss.backward()
    assert lowtide.report().replayed_ops == 0


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_every_n_refuses_invalid_numbers(n: Any) -> None:
    with pytest.raises(lowtide.ArgumentError, match="n must be an int ≥ 1"):
        lowtide.EveryN(n)


def test_layers_can_be_given() -> None:
    model = Stack(4)
    chosen = [model.blocks[1], model.blocks[3]]
    assert layers_of(model, chosen) == chosen
    assert layers_of(model, Block) == list(model.blocks)
    assert layers_of(model, "blocks.*") == [m for n, m in model.named_modules() if n.startswith("blocks.")]
    assert layers_of(model, ["blocks.0", model.head]) == [model.blocks[0], model.head]
    for nonsense in (3, [3]):
        with pytest.raises(lowtide.ArgumentError, match="layers must be modules"):
            layers_of(model, nonsense)
    with lowtide.saving(lowtide.EveryN(1, layers=chosen)):
        model(torch.randn(5, 3)).sum()
    assert lowtide.report().layers == 2


def test_a_loop_over_blocks_without_a_model_needs_layers() -> None:
    blocks = nn.ModuleList(Block() for _ in range(3))
    x = torch.randn(4, 8, requires_grad=True)
    with lowtide.saving(lowtide.EveryN(1, layers=list(blocks))):
        y = x
        for block in blocks:
            y = block(y)
        y = y.sum()
    assert lowtide.report().layers == 3
    y.backward()


def test_repeated_blocks_are_found() -> None:
    stages = nn.ModuleList(nn.ModuleDict({"parts": nn.Sequential(Block(), Block())}) for _ in range(3))
    assert len(repeated_blocks(nn.ModuleDict({"stem": nn.Linear(2, 2), "stages": stages}))) == 6
    experts = nn.ModuleList(
        nn.ModuleDict({"moe": nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(4))})})
        for _ in range(3)
    )
    assert repeated_blocks(experts) == list(experts)
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert repeated_blocks(plain) == list(plain)
    assert repeated_blocks(nn.Linear(2, 2)) == []
    with_mlp = nn.ModuleList(
        nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))}) for _ in range(3)
    )
    assert repeated_blocks(with_mlp) == list(with_mlp)


@pytest.mark.parametrize(
    ("name", "layers"),
    [("gpt2", 3), ("t5", 4), ("bart", 4), ("resnet", 4), ("swin", 4), ("mixtral", 2), ("albert", 3), ("whisper", 4)],
)
def test_layers_of_real_models(name: str, layers: int) -> None:
    from .zoo import build

    model, batch = build(name)
    with lowtide.saving(lowtide.EveryN(1)):
        model(**batch)
    assert lowtide.report().layers == layers


def test_a_model_without_repetition_is_one_layer() -> None:
    model = Block()
    with lowtide.saving(lowtide.EveryN(1)):
        loss = model(torch.randn(3, 8)).sum()
    assert lowtide.report().layers == 1
    assert lowtide.report().values_recomputed > 0
    loss.backward()


def test_save_ops_accepts_all_forms_of_op_names() -> None:
    aten = torch.ops.aten
    model = Stack(3)
    x = torch.randn(5, 3)
    for op in ("addmm", "aten.addmm", "aten::addmm", "aten.addmm.default", aten.addmm, aten.addmm.default):
        for ops in (op, [op]):
            policy = lowtide.SaveOps(ops)
            assert policy.decide(lowtide.OpInfo(0, "aten.addmm.default", layer=0)) is K
            assert policy.decide(lowtide.OpInfo(0, "aten.mm.default", layer=0)) is R
            assert policy.decide(lowtide.OpInfo(0, "aten.mm.default", outside_layers=True)) is K
            with lowtide.saving(policy):
                loss = model(x).sum()
            loss.backward()
            # norm, tanh and sum of each layer are recomputed, the product is not
            assert lowtide.report().replayed_ops == 3 * 2


def test_save_ops_without_layers_applies_to_all_ops() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    with pytest.warns(lowtide.LowtideWarning), lowtide.saving(lowtide.SaveOps("mm")):
        loss = (w @ w).sin().exp().sum()
    report = lowtide.report()
    assert report.values_kept == 1
    assert report.values_recomputed == 1
    loss.backward()


def test_selective_adds_the_costs_of_replayed_ops() -> None:
    """A long chain of cheap ops is interrupted by kept values."""
    x = torch.randn(10, requires_grad=True)
    policy = lowtide.Selective(min_cost_us=3, cost=lambda op: 1.0)
    costs = []

    @dataclasses.dataclass(frozen=True)
    class Spy(lowtide.Selective):
        def decide(self, op: lowtide.OpInfo) -> lowtide.Decision:
            costs.append(op.recompute_us)
            return super().decide(op)

    with lowtide.saving(Spy(3, lambda op: 1.0)):
        y = x
        for _ in range(7):
            y = y.sin()
        loss = y.sum()
    assert costs == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0]
    loss.backward()
    assert lowtide.report().replayed_ops == 4
    assert policy.decide(lowtide.OpInfo(0, "x", recompute_us=3.0)) is K
    assert policy.decide(lowtide.OpInfo(0, "x", recompute_us=2.9)) is R


def test_selective_measures_by_default() -> None:
    a = torch.randn(400, 400, requires_grad=True)
    small = torch.randn(4, requires_grad=True)
    policy = lowtide.Selective()
    assert policy.min_cost_us == 100
    for _ in range(20):  # on a busy machine all three timed runs may be slow
        timing.MEASURED.clear()
        for _ in range(4):  # the first runs are warm-up
            with lowtide.saving(policy):
                big = (a @ a).sin()
                cheap = (small * 2).exp()
                loss = big.sum() + cheap.sum()
            loss.backward()
        report = lowtide.report()
        if report.values_recomputed:
            break
    assert report.values_kept >= 1  # the product of 400 × 400 takes milliseconds
    assert report.values_recomputed >= 1
    for nonsense in (-1, float("nan")):
        with pytest.raises(lowtide.ArgumentError, match="≥ 0 microseconds"):
            lowtide.Selective(min_cost_us=nonsense)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=6), st.integers(-2, 45))
def test_segments_may_overlap(pairs: list[tuple[int, int]], index: int) -> None:
    ranges = [(start, start + more) for start, more in pairs]
    policy = lowtide.Segments(ranges)
    assert policy.recomputes(index) == any(start <= index <= end for start, end in ranges)
    assert policy.decide(lowtide.OpInfo(index, "x")) is (R if policy.recomputes(index) else K)


@given(st.integers(0, 200), st.integers(0, 40))
def test_uniform_segments(num_ops: int, num_segments: int) -> None:
    policy = lowtide.Segments.uniform(num_ops, num_segments)
    if num_ops == 0 or num_segments == 0 or num_segments > num_ops:
        assert policy.ranges == ()
        assert policy.mask(num_ops) == [False] * num_ops
        return
    assert len(policy.ranges) == num_segments
    lengths = [end - start + 1 for start, end in policy.ranges]
    assert set(lengths[:-1]) <= {num_ops // num_segments}
    assert lengths[-1] == num_ops - sum(lengths[:-1])
    assert policy.mask(num_ops) == [True] * num_ops
    assert not policy.recomputes(num_ops)


def test_segments_by_hand() -> None:
    policy = lowtide.Segments([(4, 5), (1, 2)])
    assert policy.ranges == ((1, 2), (4, 5))
    assert policy.mask(7) == [False, True, True, False, True, True, False]
    assert lowtide.Segments() == lowtide.Segments.uniform(3, 7)
    for nonsense in ([(2, 1)], [(-1, 3)], [(1,)], [(0.5, 1)]):
        with pytest.raises(lowtide.ArgumentError, match="0 ≤ start ≤ end"):
            lowtide.Segments(nonsense)
    with pytest.raises(lowtide.ArgumentError, match="neither may be negative"):
        lowtide.Segments.uniform(-1, 2)


def test_segments_are_recomputed() -> None:
    x = torch.randn(10, requires_grad=True)
    with lowtide.saving(lowtide.Segments([(1, 2)])):
        loss = x.sin().sin().sin().sin().sum()
    assert (lowtide.report().values_kept, lowtide.report().values_recomputed) == (1, 2)
    loss.backward()
    assert lowtide.report().replayed_ops == 2


def test_combinations() -> None:
    odd = lambda op: K if op.index % 2 else R
    third = lambda op: K if op.index % 3 == 0 else R
    either, both = lowtide.Segments([(0, 3)]) | odd, lowtide.Segments([(0, 3)]) & third
    info = [lowtide.OpInfo(i, "x") for i in range(8)]
    assert [either.decide(i) is K for i in info] == [False, True, False, True, True, True, True, True]
    assert [both.decide(i) is K for i in info] == [False, False, False, False, False, False, True, False]
    layered = lowtide.EveryN(2) | lowtide.EveryN(3)
    assert [layered.keeps_input_of(i) for i in range(7)] == [True, False, True, True, True, False, True]
    assert [(lowtide.EveryN(2) & lowtide.EveryN(3)).keeps_input_of(i) for i in range(7)] == [
        i % 6 == 0 for i in range(7)
    ]
    assert (lowtide.Selective() | lowtide.EveryN(1, layers=Block)).layers is Block
    assert (lowtide.KeepAll() & lowtide.Selective()).needs_cost
    assert not layered.needs_cost


def test_rules_are_frozen_and_comparable() -> None:
    for policy in (
        lowtide.KeepAll(),
        lowtide.KeepNone(),
        lowtide.EveryN(2),
        lowtide.Selective(),
        lowtide.Segments([(0, 1)]),
        lowtide.SaveOps("mm"),
    ):
        assert (
            policy == dataclasses.replace(policy)
            if not isinstance(policy, (lowtide.Segments, lowtide.SaveOps))
            else True
        )
        assert type(policy).__name__ in repr(policy)
        assert "O(" in (type(policy).__doc__ or "") or isinstance(policy, lowtide.Selective)
        field = dataclasses.fields(policy)[0].name if dataclasses.fields(policy) else "anything"
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError, TypeError)):
            setattr(policy, field, 5)
    assert lowtide.EveryN(2) == lowtide.EveryN(2) != lowtide.EveryN(3)


def test_any_callable_is_a_policy() -> None:
    x = torch.randn(10, requires_grad=True)
    with lowtide.saving(lambda op: R):
        loss = x.sin().exp().sum()
    loss.backward()
    assert lowtide.report().replayed_ops == 2
    with (
        pytest.raises(lowtide.ArgumentError, match=r"return lowtide.Decision.KEEP or"),
        lowtide.saving(lambda op: True),
    ):
        x.sin()
    for nonsense in (3, "KeepAll", None):
        with pytest.raises(lowtide.ArgumentError, match="is not a policy"):
            lowtide.saving(nonsense)
    with pytest.raises(lowtide.ArgumentError, match="pass an instance"):
        lowtide.saving(lowtide.KeepAll)


def test_a_report_prints_as_text() -> None:
    model = Stack(2)
    x = torch.randn(5, 3)
    with lowtide.saving(lowtide.EveryN(1)):
        loss = model(x).sum()
    loss.backward()
    text = str(lowtide.report())
    assert "policy          EveryN(n=1, layers=None)" in text
    assert "ops             11 recorded, 6 replayed" in text  # norm, linear and tanh of each layer
    assert "layers          2" in text
