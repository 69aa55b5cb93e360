"""Decisions of policies that depend only on op name and location are cached, with the same results."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import lowtide
from tests.runtimes import current_recorder

K, R = lowtide.Decision.KEEP, lowtide.Decision.RECOMPUTE
OPS = ("sin", "sigmoid", "tanh", "mul", "add")  # results stay bounded, so gradients are finite


def is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether the open scope has a recipe for this tensor."""
    recorder = current_recorder()
    assert recorder is not None
    value = recorder.memory.lookup(tensor)[1]
    assert value is not None
    return value.recipe is not None


class Ops(nn.Module):
    """Runs ops by name, and records each decision."""

    def __init__(self, names: list[str], decided: list[bool]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.names, self.decided = names, decided

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            op: Any = getattr(torch, name)
            x = op(x, self.scale) if name in ("mul", "add") else op(x)
            self.decided.append(is_recorded(x))
        return x


class Model(nn.Module):
    """An entry, some equal blocks and an exit, of random ops."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        some = lambda: draw.choices(OPS, k=draw.randint(1, 6))
        self.decided: list[bool] = []
        self.entry, self.exit = Ops(some(), self.decided), Ops(some(), self.decided)
        self.blocks = nn.ModuleList(
            nn.Sequential(Ops(some(), self.decided), Ops(some(), self.decided)) for _ in range(draw.randint(2, 5))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


class Uncached(lowtide.Policy):
    """The same decisions as `rule`, not cacheable."""

    needs_layers = True

    def __init__(self, rule: lowtide.Policy) -> None:
        self.rule, self.layers, self.calls = rule, rule.layers, 0

    def decide(self, op: lowtide.OpInfo) -> lowtide.Decision:
        self.calls += 1
        return self.rule.decide(op)

    def keeps_input_of(self, layer: int) -> bool:
        return self.rule.keeps_input_of(layer)


class Cached(Uncached):
    """The same decisions as `rule`, cacheable."""

    cacheable = True

    def decide(self, op: lowtide.OpInfo) -> lowtide.Decision:
        return super().decide(op)


def step(policy: Any, seed: int) -> tuple[list[bool], torch.Tensor, tuple[int, ...]]:
    """Return the decision for each op, the gradient, and the counts of the report."""
    model = Model(seed)
    x = torch.linspace(-1, 1, 3, requires_grad=True)
    with lowtide.saving(policy):
        loss = model(x).mul(2).sum()
    loss.backward()
    assert x.grad is not None
    report = lowtide.report()
    counts = (report.ops, report.values_kept, report.bytes_kept, report.values_recomputed, report.replayed_ops)
    return model.decided, x.grad, counts


simple = st.one_of(
    st.builds(lowtide.SaveOps, st.sets(st.sampled_from(OPS)).map(sorted), st.sampled_from([None, nn.Sequential, Ops])),
    st.builds(lowtide.EveryN, st.integers(1, 3), st.sampled_from([None, nn.Sequential, Ops])),
    st.sampled_from([lowtide.KeepAll(), lowtide.KeepNone()]),
)
layered = simple.filter(lambda rule: rule.needs_layers)
rules = st.one_of(
    layered,
    st.builds(lambda a, b: a | b, layered, simple),
    st.builds(lambda a, b: a & b, layered, simple),
)


@settings(max_examples=40, deadline=None)
@given(rules, st.integers(0, 10**6))
def test_cached_decisions_equal_uncached_ones(rule: lowtide.Policy, seed: int) -> None:
    uncached, cached = Uncached(rule), Cached(rule)
    assert rule.cacheable
    expected = step(uncached, seed)
    assert uncached.calls == expected[2][0]
    for policy in (rule, cached):
        decided, gradient, counts = step(policy, seed)
        assert decided == expected[0]
        assert torch.equal(gradient, expected[1])
        assert counts == expected[2]
    assert 0 < cached.calls <= uncached.calls


def test_decide_is_called_once_for_each_name_and_location() -> None:
    x = torch.randn(3, requires_grad=True)
    policy = Cached(lowtide.SaveOps("mul"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        with lowtide.saving(policy):
            y = x
            for _ in range(20):
                y = y.sin() * x
    assert policy.calls == 2


class KeepSmall(lowtide.SaveOps):
    """Overrides `decide` of a cacheable policy with one that is not cacheable."""

    def decide(self, op: lowtide.OpInfo) -> lowtide.Decision:
        return K if op.output_bytes <= 64 else super().decide(op)


class Sizes:
    def decide(self, op: lowtide.OpInfo) -> lowtide.Decision:
        return K if op.output_bytes <= 64 else R


class MixedIn(Sizes, lowtide.SaveOps):
    """`decide` comes from a class that is not a policy."""


class Inherits(lowtide.SaveOps):
    """Does not override `decide`."""


@pytest.mark.parametrize("policy_class", [KeepSmall, MixedIn])
def test_a_subclass_with_its_own_decide_is_not_cached(policy_class: Any) -> None:
    policy = policy_class("mul", layers=nn.Sequential)
    assert not policy.cacheable
    assert not (policy | lowtide.SaveOps("mul")).cacheable
    decided: list[bool] = []
    layer = nn.Sequential(Ops(["sin"], decided))
    with lowtide.saving(policy):
        for size in (64, 3, 64, 3):  # the same op in the same module
            torch.manual_seed(0)
            layer[0].scale.data = torch.ones(size)
            layer[0](torch.randn(size, requires_grad=True))
            layer(torch.randn(size, requires_grad=True))
    assert decided == [True, True, False, False, True, True, False, False]


def test_which_policies_are_cacheable() -> None:
    save, every, segments = lowtide.SaveOps("mul"), lowtide.EveryN(2), lowtide.Segments([(0, 3)])
    for policy in (save, every, Inherits("mul"), save | every, save & every, save | (every & lowtide.KeepNone())):
        assert policy.cacheable
    for policy in (segments, lowtide.Selective(), save | segments, segments & save, save | (lambda op: K)):
        assert not policy.cacheable


def test_decisions_by_cost_are_not_cached() -> None:
    class ByCost(Cached):
        needs_cost = True

    x = torch.randn(3, requires_grad=True)
    policy = ByCost(lowtide.SaveOps("mul", layers=Ops))
    decided: list[bool] = []
    ops = Ops(["sin"] * 5, decided)
    with lowtide.saving(policy):
        ops(x)
    assert policy.calls == 5
    assert decided == [True] * 5


def test_an_inner_scope_has_its_own_cache() -> None:
    decided: list[bool] = []
    ops = Ops(["sin", "exp"], decided)
    x = torch.randn(3, requires_grad=True)
    with lowtide.saving(lowtide.SaveOps("sin", layers=Ops)):
        ops(x)
        with lowtide.saving(lowtide.SaveOps("exp", layers=Ops)):
            ops(x)
        ops(x)
    assert decided == [False, True, True, False, False, True]


def test_a_subclass_with_its_own_decide_has_no_constant_decision() -> None:
    class DropsSines(lowtide.KeepAll):
        def decide(self, op: lowtide.OpInfo) -> lowtide.Decision:
            return R if op.name == "aten.sin.default" else K

    class StillKeeps(lowtide.KeepAll):
        pass

    x = torch.ones(3, requires_grad=True)
    with lowtide.saving(DropsSines()):
        assert is_recorded(x.sin())
        assert not is_recorded(x.cos())
    with lowtide.saving(StillKeeps()):
        assert not is_recorded(x.sin())
