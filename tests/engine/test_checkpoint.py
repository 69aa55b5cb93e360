"""`lowtide.checkpoint`, a drop-in replacement for `torch.utils.checkpoint.checkpoint`."""

from __future__ import annotations

import functools
import inspect
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import lowtide
from lowtide.torch_compat import innermost_mode

Pair = namedtuple("Pair", "a b")


@dataclass
class Box:
    tensor: torch.Tensor
    label: str


torch.utils._pytree.register_dataclass(Box)


def grads(f: Any, *leaves: torch.Tensor) -> tuple[Any, ...]:
    return torch.autograd.grad(f(), leaves, allow_unused=True)


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


def test_the_call_is_that_of_torch() -> None:
    theirs = inspect.signature(torch_checkpoint.checkpoint).parameters
    ours = inspect.signature(lowtide.checkpoint).parameters
    keywords = {n for n, p in theirs.items() if p.kind is p.KEYWORD_ONLY} | {"use_reentrant"}
    assert keywords <= set(ours) | {"use_reentrant"}
    assert "use_reentrant" in ours
    sequential = inspect.signature(torch_checkpoint.checkpoint_sequential).parameters
    assert list(sequential) == list(inspect.signature(lowtide.checkpoint_sequential).parameters)


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"use_reentrant": False},
        {"use_reentrant": True},
        {"preserve_rng_state": False},
        {"determinism_check": "none"},
        {"debug": True},
        {"early_stop": False},
    ],
)
def test_keywords_are_accepted_and_the_gradient_is_right(keywords: dict[str, Any]) -> None:
    x = torch.randn(40, 40, requires_grad=True)

    def f(t: torch.Tensor) -> torch.Tensor:
        return F.dropout(t.sin(), 0.5, True).exp()

    torch.manual_seed(1)
    plain = grads(lambda: f(x).sum(), x)
    torch.manual_seed(1)
    assert_same(plain, grads(lambda: lowtide.checkpoint(f, x, **keywords).sum(), x))
    assert lowtide.report().replayed_ops > 0


def test_containers_in_and_out() -> None:
    x, y, z = (torch.randn(5, requires_grad=True) for _ in range(3))

    def f(first: Any, *rest: Any, deep: Any, box: Box, n: int = 2, flag: bool = False) -> Any:
        a = first["x"].sin() * rest[0][1] + deep.a[0].exp() * n
        return {"out": [a, (a * box.tensor, "text", None)], "pair": Pair(a.tanh(), n), "flag": flag}

    def call(run: Any) -> torch.Tensor:
        out = run(f, {"x": x}, [1, y], deep=Pair([z], 3), box=Box(x * 2, "b"), n=3, flag=True)
        assert out["flag"] is True
        assert out["out"][1][1:] == ("text", None)
        assert out["pair"].b == 3
        return out["out"][0].sum() + out["out"][1][0].sum() + out["pair"].a.sum()

    plain = grads(lambda: call(lambda fn, *a, **k: fn(*a, **k)), x, y, z)
    assert_same(plain, grads(lambda: call(lowtide.checkpoint), x, y, z))


def test_closures_parameters_and_inputs_without_grad() -> None:
    linear = nn.Linear(6, 6)
    captured = torch.randn(6, requires_grad=True)
    frozen = torch.randn(3, 6)
    f = lambda t: (linear(t).tanh() * captured).exp()
    leaves = (captured, *linear.parameters())
    assert_same(grads(lambda: f(frozen).sum(), *leaves), grads(lambda: lowtide.checkpoint(f, frozen).sum(), *leaves))


def test_only_some_inputs_need_gradients() -> None:
    a, c = (torch.randn(4, requires_grad=True) for _ in range(2))
    b = torch.randn(4)
    f = lambda p, q, r: (p * q).sin() * r.exp()
    loss = lowtide.checkpoint(f, a, b, c).sum()
    loss.backward()
    assert b.grad is None
    assert_same((a.grad, c.grad), grads(lambda: f(a, b, c).sum(), a, c))


def test_several_outputs_used_apart() -> None:
    x = torch.randn(8, requires_grad=True)
    f = lambda t: (t.sin(), t.exp().cos(), t.detach())
    a, b, d = lowtide.checkpoint(f, x)
    assert not d.requires_grad
    (first,) = torch.autograd.grad(a.square().sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(b.square().sum(), x)
    assert_same((first,), grads(lambda: f(x)[0].square().sum(), x))
    assert_same((second,), grads(lambda: f(x)[1].square().sum(), x))


def test_vector_outputs_take_a_vector_jacobian_product() -> None:
    x = torch.randn(6, requires_grad=True)
    v = torch.randn(6)
    lowtide.checkpoint(lambda t: t.sin().exp(), x).backward(v)
    ours, x.grad = x.grad, None
    x.sin().exp().backward(v)
    assert torch.equal(ours, x.grad)


def test_chained_and_nested() -> None:
    x = torch.randn(16, 16, requires_grad=True)
    f = lambda t: F.dropout(t.sin(), 0.3, True)
    g = lambda t: lowtide.checkpoint(f, t.exp()).tanh()

    def chain(run: Any) -> torch.Tensor:
        y = x
        for _ in range(4):
            y = run(g, run(f, y)) + y
        return y.sum()

    torch.manual_seed(3)
    plain = grads(lambda: chain(lambda h, t: h(t)), x)
    torch.manual_seed(3)
    assert_same(plain, grads(lambda: chain(lowtide.checkpoint), x))


def test_inside_a_scope_and_inside_torch_checkpoint() -> None:
    x = torch.randn(16, 16, requires_grad=True)
    f = lambda t: (t.sin().exp() * t).tanh()
    plain = grads(lambda: f(f(x)).sum(), x)
    with lowtide.saving(lowtide.KeepAll()):
        loss = lowtide.checkpoint(f, lowtide.checkpoint(f, x)).sum()
    assert lowtide.report().values_recomputed > 0
    assert_same(plain, torch.autograd.grad(loss, x))
    outer = torch_checkpoint.checkpoint(lambda t: lowtide.checkpoint(f, f(t)), x, use_reentrant=False)
    assert_same(plain, torch.autograd.grad(outer.sum(), x))


def test_hooks_on_leaves_fire_once() -> None:
    x = torch.randn(4, requires_grad=True)
    seen = []
    x.register_hook(lambda g: seen.append(g.clone()))
    lowtide.checkpoint(lambda t: t.sin().exp() + t, x).sum().backward()
    assert len(seen) == 1


def test_checkpoint_saves_memory() -> None:
    from lowtide.profiling.peak_meter import PeakMeter

    x = torch.randn(1000, requires_grad=True)

    def f(t: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            t = t.sin()
        return t

    with PeakMeter() as meter:
        y = lowtide.checkpoint(f, x)
        assert meter.live_bytes == 4000
        y.sum().backward()
    assert meter.peak_bytes >= 20 * 4000  # in backward all values of the segment are live once


def test_nothing_is_recorded_without_grad() -> None:
    x = torch.randn(4, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(lowtide.checkpoint(torch.sin, x), x.detach().sin())
    y = lowtide.checkpoint(torch.sin, torch.randn(4))
    assert not y.requires_grad


def test_no_inputs() -> None:
    w = torch.randn(4, requires_grad=True)
    assert_same(
        grads(lambda: lowtide.checkpoint(lambda: w.sin().exp()).sum(), w), grads(lambda: w.sin().exp().sum(), w)
    )
    assert torch.equal(lowtide.checkpoint(lambda: torch.ones(3)), torch.ones(3))
    assert lowtide.checkpoint(lambda: None) is None
    with torch.no_grad():
        lowtide.checkpoint(lambda: torch.ones(3))


@dataclass
class Batch:
    """Not registered with torch, so its tensors are not found by searching containers."""

    x: torch.Tensor
    scale: float = 2.0


class Holder:
    def __init__(self, batch: Batch) -> None:
        self.batch = batch


@pytest.mark.parametrize("wrap", [lambda b: b, Holder, lambda b: [Holder(b)]])
def test_objects_that_hold_tensors(wrap: Any) -> None:
    def layer(given: Any) -> Any:
        given = given[0] if isinstance(given, list) else given
        batch = given.batch if isinstance(given, Holder) else given
        return wrap(Batch((batch.x * batch.scale).sin().exp()))

    def loss(run: Any, x: torch.Tensor) -> torch.Tensor:
        made = run(layer, wrap(Batch(x)))
        made = made[0] if isinstance(made, list) else made
        batch = made.batch if isinstance(made, Holder) else made
        return batch.x.square().sum()

    x = torch.randn(5, requires_grad=True)
    assert_same(grads(lambda: loss(lowtide.checkpoint, x), x), grads(lambda: loss(lambda f, *args: f(*args), x), x))
    assert lowtide.report().values_recomputed >= 2


def test_random_numbers_are_reproduced_and_the_generator_continues() -> None:
    x = torch.randn(3000, requires_grad=True)
    f = lambda t: (t * torch.rand(3000)).sin() * F.dropout(t, 0.5, True)
    torch.manual_seed(8)
    plain = grads(lambda: f(x).sum(), x)
    after = torch.rand(4)
    torch.manual_seed(8)
    assert_same(plain, grads(lambda: lowtide.checkpoint(f, x, preserve_rng_state=False).sum(), x))
    assert torch.equal(torch.rand(4), after)


def test_an_error_in_the_function_propagates_and_state_is_restored() -> None:
    x = torch.randn(3000, requires_grad=True)

    def f(t: torch.Tensor) -> torch.Tensor:
        F.dropout(t, 0.5, True).sin()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        lowtide.checkpoint(f, x)
    assert innermost_mode() is None
    assert_same(grads(lambda: x.sin().sum(), x), grads(lambda: lowtide.checkpoint(torch.sin, x).sum(), x))


def test_input_changed_between_forward_and_backward_is_an_error() -> None:
    x = torch.randn(4, requires_grad=True)
    y = lowtide.checkpoint(lambda t: t.sin().exp(), x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(lowtide.StaleSourceError):
        y.sum().backward()


def test_selective_contexts_of_torch_are_honoured() -> None:
    w = torch.randn(32, 32, requires_grad=True)
    x = torch.randn(32, 32)
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> torch_checkpoint.CheckpointPolicy:
        seen.append((op, args))
        save = op is torch.ops.aten.mm.default
        return (
            torch_checkpoint.CheckpointPolicy.MUST_SAVE if save else torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
        )

    f = lambda t: ((t @ w).sin() @ w).exp()
    context_fn = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, policy)
    loss = lowtide.checkpoint(f, x, use_reentrant=False, context_fn=context_fn).sum()
    report = lowtide.report()
    assert (report.values_kept, report.values_recomputed) == (1, 2)  # the first product; sin's and exp's outputs
    assert any(op is torch.ops.aten.mm.default and args[0] is x for op, args in seen)
    assert_same(torch.autograd.grad(loss, w), grads(lambda: f(x).sum(), w))
    listed = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    assert_same(grads(lambda: lowtide.checkpoint(f, x, context_fn=listed).sum(), w), grads(lambda: f(x).sum(), w))


def test_other_contexts_are_entered_once() -> None:
    import contextlib

    entered = []

    @contextlib.contextmanager
    def record(name: str) -> Any:
        entered.append(name)
        yield

    x = torch.randn(4, requires_grad=True)
    lowtide.checkpoint(
        lambda t: t.sin().exp(), x, context_fn=lambda: (record("forward"), record("recompute"))
    ).sum().backward()
    assert entered == ["forward"]


@pytest.mark.parametrize("segments", [1, 2, 3, 5])
def test_sequential(segments: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(5)))
    x = torch.randn(64, 8, requires_grad=True)
    torch.manual_seed(1)
    plain = grads(lambda: model(x).sum(), x, *model.parameters())
    for functions in (model, list(model)):
        torch.manual_seed(1)
        ours = grads(
            lambda: lowtide.checkpoint_sequential(functions, segments, x, use_reentrant=False).sum(),
            x,
            *model.parameters(),
        )
        assert_same(plain, ours)


def test_sequential_refuses_invalid_segments() -> None:
    with pytest.raises(lowtide.ArgumentError, match="between 1 and the number of functions \\(2\\), not 3"):
        lowtide.checkpoint_sequential([torch.sin, torch.cos], 3, torch.ones(1))
