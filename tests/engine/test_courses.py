"""Rules that weigh time are asked until all times on the way are settled; their answers stay those of asking."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import lowtide
from lowtide.engine import costs, course
from lowtide.engine.scope import current_recorder

K, R = lowtide.Decision.KEEP, lowtide.Decision.RECOMPUTE
OPS = ("sin", "sigmoid", "tanh", "atan", "cos")  # nothing grows, so that gradients stay numbers
SETTLED = 4  # forwards: each op is timed in three


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Each test learns for itself."""
    course._ways.clear()
    costs._measured.clear()
    yield
    course._ways.clear()


@dataclass(frozen=True)
class Asked(lowtide.Selective):
    """The same rule, asked for every op: a decide of its own makes no promise."""

    def decide(self, op: lowtide.OpInfo) -> lowtide.Decision:
        return super().decide(op)


@dataclass(frozen=True)
class Counted(lowtide.Selective):
    """The same rule, which promises to be steady, and counts how often it is asked."""

    asks: tuple[list[str]] = ([],)  # type: ignore[assignment]
    steady = True

    def __hash__(self) -> int:
        return hash(self.min_cost_us)

    def decide(self, op: lowtide.OpInfo) -> lowtide.Decision:
        self.asks[0].append(op.name)
        return super().decide(op)


def kept(tensor: torch.Tensor) -> bool:
    recorder = current_recorder()
    assert recorder is not None
    value = recorder._known(tensor)[1]
    assert value is not None
    return value.recipe is None


def forward(policy: lowtide.Policy, names: list[str], size: int = 8) -> tuple[list[bool], torch.Tensor]:
    """What was decided for each op, and the gradient."""
    x = torch.linspace(-1, 1, size, requires_grad=True)
    decided = []
    with lowtide.saving(policy):
        y = x
        for name in names:
            y = getattr(torch, name)(y)
            decided.append(kept(y))
        loss = y.sum()
    loss.backward()
    assert x.grad is not None
    return decided, x.grad


def settle(policy: lowtide.Policy, *ways: list[str]) -> None:
    for _ in range(SETTLED):
        for names in ways:
            forward(policy, names)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 5.0, 20.0, 1e9]))
def test_what_is_remembered_is_what_asking_would_answer(seed: int, dear_us: float) -> None:
    draw = random.Random(seed)
    ways = [draw.choices(OPS, k=draw.randint(1, 12)) for _ in range(4)]
    course._ways.clear()
    policy, asked = lowtide.Selective(dear_us), Asked(dear_us)
    assert policy.steady
    assert not asked.steady
    settle(policy, *ways)
    for names in draw.choices(ways, k=8):  # all times are final, so that both know the same
        plain = torch.linspace(-1, 1, 8, requires_grad=True)
        y = plain
        for name in names:
            y = getattr(torch, name)(y)
        y.sum().backward()
        decided, gradient = forward(policy, names)
        assert decided == forward(asked, names)[0]
        assert plain.grad is not None
        assert torch.equal(gradient, plain.grad)


def test_a_settled_way_is_not_asked_again() -> None:
    policy = Counted(10.0)
    way = ["sin", "exp", "tanh"]
    asks = policy.asks[0]
    asks.clear()
    forward(policy, way)
    assert len(asks) == 4  # with the sum
    settle(policy, way)
    asks.clear()
    forward(policy, way)
    assert asks == []


def test_where_the_way_parts_the_rest_is_asked_for() -> None:
    policy = Counted(10.0)
    asks = policy.asks[0]
    settle(policy, ["sin", "exp", "tanh"], ["cos"])
    asks.clear()
    forward(policy, ["sin", "exp", "cos", "sin"])  # cos is settled, so that the new way is remembered at once
    assert asks == ["aten.cos.default", "aten.sin.default", "aten.sum.default"]
    asks.clear()
    forward(policy, ["sin", "exp", "cos", "sin"])
    forward(policy, ["sin", "exp", "tanh"])
    assert asks == []


def test_an_op_that_no_one_expected_is_kept_and_then_measured() -> None:
    policy = lowtide.Selective(1e9)  # nothing would be dear enough
    settle(policy, ["sin", "exp"])
    assert forward(policy, ["sin", "atan", "exp"])[0] == [False, True, False]
    settle(policy, ["atan"])
    assert forward(policy, ["sin", "atan", "exp"])[0] == [False, False, False]


def test_other_sizes_go_their_own_way() -> None:
    policy = Counted(10.0)
    asks = policy.asks[0]
    settle(policy, ["sin", "exp"])
    asks.clear()
    forward(policy, ["sin", "exp"], size=9)
    assert asks == ["aten.exp.default", "aten.sum.default"]  # the sin came untimed, and was kept


def test_who_is_steady() -> None:
    @dataclass(frozen=True)
    class OwnCost(lowtide.Selective):
        def own_cost_us(self, op: lowtide.OpInfo, measured_us: float) -> float:
            return 1.0

    class Inherits(lowtide.Selective):
        pass

    selective, save = lowtide.Selective(), lowtide.SaveOps("mul")
    for policy in (selective, Inherits(5.0), selective | save, save & selective):
        assert policy.steady
    for policy in (OwnCost(), Asked(), lowtide.Selective(cost=lambda op: 1.0), selective | (lambda op: K)):
        assert not policy.steady


def test_a_users_costs_are_asked_for_every_time() -> None:
    asked = []
    policy = lowtide.Selective(2.0, cost=lambda op: asked.append(op.name) or 1.0)
    for _ in range(6):
        forward(policy, ["sin", "exp"])
    assert len(asked) == 6 * 3


def test_no_model_is_held_for_its_layers() -> None:
    block = nn.Linear(4, 4)
    gone = weakref.ref(block)
    policy = lowtide.SaveOps("mm", layers=(block,)) | lowtide.Selective()
    x = torch.randn(2, 4, requires_grad=True)
    for _ in range(SETTLED):
        with lowtide.saving(policy):
            loss = block(x).sum()
        loss.backward()
    del block, policy, loss
    gc.collect()
    assert gone() is None


def test_rules_and_ways_without_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "_MOST_STEPS", 5)
    for dear_us in range(40):
        settle(lowtide.Selective(float(dear_us)), ["sin", "exp"])
    assert len(course._ways) == course._MOST_POLICIES
    policy = lowtide.Selective(39.0)
    settle(policy, ["sin", "exp", "tanh"], ["exp", "sin"], ["tanh"])
    decided, gradient = forward(policy, ["sin", "exp", "tanh"])
    assert decided == forward(Asked(39.0), ["sin", "exp", "tanh"])[0]
    assert torch.isfinite(gradient).all()


def test_a_scope_inside_another_does_not_mix_ways() -> None:
    outer, inner = lowtide.Selective(1e9), lowtide.KeepAll()

    def step() -> list[bool]:
        x = torch.linspace(-1, 1, 8, requires_grad=True)
        decided = []
        with lowtide.saving(outer):
            y = x.sin()
            decided.append(kept(y))
            with lowtide.saving(inner):
                y = y.exp()
                decided.append(kept(y))
            y = y.cos()
            decided.append(kept(y))
            loss = y.sum()
        loss.backward()
        return decided

    assert [step() for _ in range(SETTLED + 2)] == [[False, True, False]] * (SETTLED + 2)
