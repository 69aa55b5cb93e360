"""Gradients that are views of a larger gradient are copied: same bits, same strides, less memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import lowtide
from lowtide.engine.recording import gradient_copies
from lowtide.engine.recording.gradient_copies import copy_gradients
from lowtide.fitting.plan import profile
from lowtide.planning import Problem, Simulator, solve
from lowtide.planning.smallest import smallest
from lowtide.profiling.peak_meter import PeakMeter
from lowtide.records import Trace

PART = 4 * 8 * 32 * 32 * 4
"""Bytes of one skip connection."""
WAIT = 12
"""Nodes between the two ends of a skip connection."""


class SkipNet(nn.Module):
    """A small U-Net: outputs of the first half are concatenated in the second half."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.inner = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2 * depth))
        self.joins = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for conv in self.inner:
            skips.append(x)
            x = torch.tanh(conv(x))
        for conv in self.joins:
            x = torch.tanh(conv(torch.cat([x, skips.pop(0)], 1)))
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, x: Tensor, around: Callable[[Tensor], Any] | None = None) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(x)
    if around is None:
        loss.backward()
    else:
        with around(loss):
            loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.fixture
def copy_small_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_copies, "MIN_BYTES", 1)


class CopyLog:
    """Records the bytes of copied views and the seconds of each copy."""

    def __init__(self) -> None:
        self.view_bytes: list[int] = []
        self.seconds: list[float] = []

    def __call__(self, view: Tensor) -> Callable[[float], None]:
        self.view_bytes.append(view.nbytes)
        return self.seconds.append


def test_the_larger_gradients_are_freed() -> None:
    model, x = SkipNet(), batch()
    plain = gradients(model, x)
    held = []
    for oldest in (None, 0):
        model.zero_grad(set_to_none=True)
        copies = CopyLog()
        with PeakMeter([*model.parameters(), x]) as meter:
            loss = model(x)
            # In the middle of backward, the gradients of all three skip connections are held.
            hook = model.inner[3].weight.register_hook(lambda gradient: held.append(meter.live_bytes))
            with copy_gradients([loss], oldest, copies):
                loss.backward()
        hook.remove()
        assert equal(plain, [p.grad for p in model.parameters()])
    assert copies.view_bytes == [PART] * 3
    assert len(copies.seconds) == 3
    assert min(copies.seconds) > 0
    assert held[0] - held[1] == 3 * PART  # each view is half of its gradient


class RecordGradients(torch.autograd.Function):
    """Identity that records its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorded: list[tuple[Tensor, Any]]) -> Tensor:
        ctx.recorded = recorded
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.recorded.append((gradients[0].clone(), gradients[0].stride()))
        return gradients[0], None


def recorded_gradients(program: Callable[[Tensor], Tensor], x: Tensor, copying: bool) -> list[tuple[Tensor, Any]]:
    """Return the gradients at the start of the skip connection and at the input, with their strides."""
    recorded: list[tuple[Tensor, Any]] = []
    x = x.detach().requires_grad_()
    loss = program(RecordGradients.apply(x, recorded))
    copies = CopyLog()
    with copy_gradients([loss], 0 if copying else None, copies):
        loss.backward()
    assert x.grad is not None
    assert len(copies.view_bytes) == len(copies.seconds)
    return [*recorded, (x.grad, x.grad.stride())]


@st.composite
def layouts(draw: st.DrawFn) -> Tensor:
    """Draw dense tensors with any order of dimensions, also of size 1."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    dense = torch.randn([shape[d] for d in order], generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    return dense.permute([order.index(d) for d in range(len(shape))])


@pytest.mark.usefixtures("copy_small_views")
@settings(deadline=None, max_examples=300)
@given(layouts(), st.data())
def test_copies_have_the_bits_and_strides_of_the_views(x: Tensor, data: st.DataObject) -> None:
    """Two or more gradients of any layout are added at the start of the skip connection, in any order."""
    dim = data.draw(st.integers(0, x.dim() - 1))
    other = data.draw(st.permutations(range(x.dim())))
    first, released = data.draw(st.booleans()), data.draw(st.booleans())

    def program(skip: Tensor) -> Tensor:
        y = skip
        for _ in range(WAIT):
            y = torch.tanh(y)
        y = y.permute(other).contiguous().permute([other.index(d) for d in range(x.dim())])
        joined = torch.cat([skip, y] if first else [y, skip], dim)
        loss = (joined * joined.detach().cos()).sum()
        return loss + (skip * 2.0).sum() if released else loss

    plain, ours = (recorded_gradients(program, x, copying) for copying in (False, True))
    assert [stride for _, stride in plain] == [stride for _, stride in ours]
    assert equal([gradient for gradient, _ in plain], [gradient for gradient, _ in ours])


class NoGradient(torch.autograd.Function):
    """Identity without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


@pytest.mark.usefixtures("copy_small_views")
def test_a_copy_without_another_gradient_gets_its_strides_back() -> None:
    def program(skip: Tensor) -> Tensor:
        y = NoGradient.apply(skip)
        for _ in range(WAIT):
            y = torch.tanh(y)
        return (torch.cat([y, skip], 1) ** 2).sum()

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    plain, ours = (recorded_gradients(program, x, copying) for copying in (False, True))
    assert plain[0][1] == ours[0][1] == (10, 1)
    assert equal([gradient for gradient, _ in plain], [gradient for gradient, _ in ours])


def test_hooks_are_removed_if_backward_fails() -> None:
    model, x = SkipNet(), batch()
    plain = gradients(model, x)
    copies = CopyLog()

    def fails(gradient: Tensor) -> None:
        raise ZeroDivisionError

    hook = model.first.weight.register_hook(fails)
    loss = model(x)
    with pytest.raises(ZeroDivisionError), copy_gradients([loss], 0, copies):
        loss.backward(retain_graph=True)
    hook.remove()
    assert len(copies.view_bytes) == 3
    model.zero_grad(set_to_none=True)
    loss.backward()
    assert len(copies.view_bytes) == 3
    assert equal(plain, [p.grad for p in model.parameters()])


@pytest.fixture
def fitted_models() -> Iterator[list[nn.Module]]:
    models: list[nn.Module] = []
    yield models
    for model in models:
        lowtide.unfit(model)


def test_a_profile_predicts_the_bytes_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = SkipNet(), batch()
    with_copies = profile(model, (x,), loss=lambda out: out)
    monkeypatch.setattr(gradient_copies, "find_splits", lambda roots, oldest: [])
    plain = profile(model, (x,), loss=lambda out: out)
    assert with_copies.copying_s > 0
    assert plain.copies == ()
    assert plain.copying_s == 0

    def others(trace: Trace) -> list[tuple[int, int]]:
        return [(unpack.other_bytes, unpack.rise_bytes) for unpack in trace.unpacks]

    assert others(with_copies.without_copies()) == others(plain)
    assert max(p - c for (p, _), (c, _) in zip(others(plain), others(with_copies), strict=True)) == 3 * PART
    assert with_copies.fingerprint == plain.fingerprint


def test_plans_copy_only_if_this_lowers_the_peak(fitted_models: list[nn.Module]) -> None:
    model, x = SkipNet(), batch()
    plain_gradients = gradients(model, x)
    model.zero_grad(set_to_none=True)
    trace = profile(model, (x,), loss=lambda out: out)
    simulators = [Simulator(Problem(one)) for one in (trace.without_copies(), trace)]
    without, with_them = (smallest(s).peak_bytes for s in simulators)
    assert with_them < without  # so some budgets need copies
    everything = simulators[0].run([True] * len(trace.ops)).peak_bytes
    assert not solve(trace, everything).copies
    assert not solve(trace, everything - 1024).copies
    plan = solve(trace, with_them)
    assert plan.copies
    assert "copy " in str(plan)
    assert lowtide.Plan.from_json(plan.to_json()) == plan

    lowtide.fit(model, plan=plan, budget=2**40)
    fitted_models.append(model)
    for _ in range(3):
        assert equal(plain_gradients, gradients(model, x))
    report = lowtide.report(model)
    assert report.online_steps == 0
    assert report.measured_peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.01)
    assert report.measured_peak_bytes < without
