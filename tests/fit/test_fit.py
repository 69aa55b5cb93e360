"""`fit` is exact, stays within the budget, agrees with its predictions and leaves no state."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide._units import format_time
from lowtide.engine.runtime import current_runtime
from lowtide.fitting import registry
from lowtide.torch_compat import innermost_mode
from tests.runtimes import current_recorder, ledger, open_steps

from ..engine import deep, zoo
from ..engine.budgets import fixed_bytes
from ..engine.steps import Step, assert_equal, loss_of, run_step

DROP_ONLY: dict[str, Any] = {"stores": None, "codecs": None}


def fitted_steps(model: nn.Module, batch: Any, limit: int, steps: int = 4, **options: Any) -> list[Step]:
    """Run steps of a fitted model. The bytes that only the test holds are added to `limit`."""
    lowtide.fit(model, budget=f"{limit} B", **{**DROP_ONLY, **options})
    state = registry.state_of(model)
    begin = state.before_forward
    fixed = fixed_bytes(model, batch)

    def before_forward(*args: Any) -> None:
        gc.collect()
        ledger().count_everything()
        state.limit_bytes = limit + ledger().live_bytes - fixed
        begin(*args)

    state.before_forward = before_forward  # type: ignore[method-assign]
    return [run_step(model, batch) for _ in range(steps)]


def smallest_limit(model: nn.Module, batch: Any) -> int:
    """Return the smallest budget with a plan, without the bytes that only the test holds."""
    gc.collect()
    ledger().count_everything()
    beside = ledger().live_bytes - fixed_bytes(model, batch)
    with pytest.raises(lowtide.BudgetError) as caught:
        lowtide.plan(model, batch, "1 KiB", loss=loss_of)
    assert caught.value.smallest_bytes is not None
    caught.value.__traceback__ = None
    return caught.value.smallest_bytes - beside


@pytest.mark.parametrize("share", [0.6, 0.4])
@pytest.mark.parametrize("name", sorted(deep.DEEP))
def test_held_predicted_and_exact(name: str, share: float) -> None:
    model, batch = deep.build(name)
    plain = run_step(model, batch)
    limit = int(share * plain.peak_bytes)
    steps = fitted_steps(model, batch, limit)
    for step in steps:
        assert_equal(plain, step)
        assert step.peak_bytes <= limit
    report = lowtide.report(model)
    assert report.online_steps == 1
    assert report.predicted_peak_bytes is not None
    assert report.measured_peak_bytes is not None
    assert abs(report.predicted_peak_bytes - report.measured_peak_bytes) <= 0.03 * report.measured_peak_bytes
    assert report.plan is not None
    assert len(report.plan.recomputed) > 0
    lowtide.unfit(model)


@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_every_architecture_is_exact(name: str) -> None:
    """Also where a convolution with a large workspace is the last op, so that little memory can be saved."""
    model, batch = zoo.build(name)
    plain = run_step(model, batch)
    fixed = fixed_bytes(model, batch)
    limit = max(fixed + int(0.8 * (plain.peak_bytes - fixed)), smallest_limit(model, batch))
    assert limit < plain.peak_bytes
    for step in fitted_steps(model, batch, limit, steps=4):  # profiled, measured twice, not measured
        assert_equal(plain, step)
        assert step.peak_bytes <= limit
    lowtide.unfit(model)


def stack(depth: int = 10, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())))


class Loop:
    """A plain training loop, with a loss outside the model."""

    def __init__(self, fitted: bool, **options: Any) -> None:
        self.model = stack()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        torch.manual_seed(7)
        self.data = [(torch.randn(rows, 64), torch.randn(rows, 64)) for rows in (512, 512, 256, 512, 256, 512)]
        self.losses: list[float] = []
        if fitted:
            lowtide.fit(self.model, optimizer=self.optimizer, **{"budget": "1 GiB", **DROP_ONLY, **options})

    def run(self, accumulate: int = 1) -> list[float]:
        for k, (x, y) in enumerate(self.data):
            loss = nn.functional.mse_loss(self.model(x), y) / accumulate
            loss.backward()
            self.losses.append(loss.item())
            if (k + 1) % accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self.losses


def tight(model: nn.Module, rows: int = 512) -> str:
    """Return a budget for `stack` above the live bytes at which many values are recomputed."""
    ledger().count_everything()
    parameters = sum(p.nbytes for p in model.parameters())
    return f"{ledger().live_bytes + 3 * parameters + 9 * rows * 64 * 4} B"


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_training_is_bit_equal(accumulate: int) -> None:
    expected = Loop(False).run(accumulate)
    ours = Loop(True)
    lowtide.fit(ours.model, budget=tight(ours.model), optimizer=ours.optimizer, **DROP_ONLY)
    assert ours.run(accumulate) == expected
    report = lowtide.report(ours.model)
    assert report.steps == len(expected)
    assert report.step_signatures == (1 if accumulate == 1 else 2)  # without and with gradients before the step
    assert report.measured_peak_bytes is None or report.measured_peak_bytes <= report.budget_bytes
    lowtide.unfit(ours.model)


def test_a_loss_outside_the_model_belongs_to_the_step() -> None:
    model = stack(4)
    lowtide.fit(model, budget="1 GiB", **DROP_ONLY)
    x = torch.randn(128, 64)
    for _ in range(2):
        model.zero_grad()
        (model(x).exp().square() * 2).mean().backward()
    plan = lowtide.report(model).plan
    assert plan is not None
    assert "aten.exp.default" in plan.op_names
    assert current_recorder() is None
    lowtide.unfit(model)


def test_outer_modes_and_hooks_may_close_before_backward() -> None:
    """With hooks of other code around the call, recording ends with the call, and the hooks work."""
    model = stack(4)
    x = torch.randn(64, 64)
    expected = run_step(model, (x,))
    lowtide.fit(model, budget="1 GiB", **DROP_ONLY)
    packed = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        assert torch.equal(loss.detach(), expected.loss)
        assert all(torch.equal(p.grad, expected.grads[n]) for n, p in model.named_parameters() if p.grad is not None)
    lowtide.unfit(model)


def test_several_forwards_before_a_backward() -> None:
    def losses(model: nn.Module) -> list[bytes]:
        """Return loss and gradients of each step, not as tensors, which would count against the budget."""
        results = []
        for seed in range(3):
            torch.manual_seed(seed)
            a, b = model(torch.randn(64, 64)), model(torch.randn(64, 64))
            loss = (a - b).square().mean() + model(a).mean()
            loss.backward()
            held = [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]
            results += [tensor.numpy().tobytes() for tensor in held]
            model.zero_grad()
        return results

    plain = losses(stack(5))
    model = stack(5)
    lowtide.fit(model, budget=tight(model, 64), **DROP_ONLY)
    assert losses(model) == plain
    lowtide.unfit(model)


def test_two_fitted_models_at_once() -> None:
    def steps(fitted: bool) -> list[torch.Tensor]:
        first, second = stack(4), stack(6)
        if fitted:
            lowtide.fit(first, budget="1 GiB", **DROP_ONLY)
            lowtide.fit(second, budget="1 GiB", **DROP_ONLY)
        results = []
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(32, 64)
            loss = second(first(x)).square().mean()
            loss.backward()
            second(x).mean().backward()
            results += [p.grad.clone() for m in (first, second) for p in m.parameters() if p.grad is not None]
        if fitted:
            lowtide.unfit(first)
            lowtide.unfit(second)
        return results

    assert all(torch.equal(a, b) for a, b in zip(steps(False), steps(True), strict=True))


class Branches(nn.Module):
    """A model whose control flow depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flip = bool(x[0, 0] > 0)
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if k == 5 and flip:
                x = x.sin() * 2
        return x


def test_a_step_that_differs_from_its_plan_is_exact() -> None:
    model = Branches()
    batches = [torch.randn(128, 64, generator=torch.Generator().manual_seed(s)) for s in range(8)]
    expected = []
    for x in batches:
        model.zero_grad()
        model(x).square().mean().backward()
        expected.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    lowtide.fit(model, budget=tight(model, 128), **DROP_ONLY)
    took = set()
    for x, grads in zip(batches, expected, strict=True):
        model.zero_grad()
        out = model(x)
        out.square().mean().backward()
        took.add(lowtide.report().ops)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert len(took) > 1, "the data never took the other branch"
    lowtide.unfit(model)


def test_plans_are_kept_from_run_to_run(tmp_path: Path) -> None:
    x = torch.randn(256, 64)
    expected = run_step(stack(), (x,))

    def train(steps: int, budget: int | None = None) -> tuple[lowtide.Plan | None, int]:
        model = stack()
        lowtide.fit(model, budget=budget or tight(model, 256), cache=tmp_path / "plans", **DROP_ONLY)
        for _ in range(steps):
            assert_equal(expected, run_step(model, (x,)))
        report = lowtide.report(model)
        budgets.append(report.budget_bytes)
        lowtide.unfit(model)
        return report.plan, report.online_steps

    budgets: list[int] = []
    made, online = train(2)
    assert online == 1
    (path,) = (tmp_path / "plans").iterdir()
    assert path.stat().st_mode & 0o077 == 0
    released, online = train(1, budgets[0])
    assert online == 0
    assert made is not None
    assert released == made
    path.write_text(path.read_text()[:100])
    with pytest.warns(lowtide.LowtideWarning, match="ignored .*plan"):
        _, online = train(1, budgets[0])
    assert online == 1


def test_eval_and_no_grad_cost_nothing() -> None:
    model = stack(3)
    lowtide.fit(model, budget="1 GiB")
    x = torch.randn(4, 64)
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    assert lowtide.report(model).steps == 0
    assert current_recorder() is None
    lowtide.unfit(model)


def test_a_forward_without_backward_is_discarded() -> None:
    model = stack(3)
    lowtide.fit(model, budget="1 GiB", **DROP_ONLY)
    for _ in range(3):
        model(torch.randn(4, 64))
    model(torch.randn(4, 64)).sum().backward()
    assert lowtide.report(model).steps == 1
    assert current_recorder() is None
    lowtide.unfit(model)


def test_an_exception_in_forward_ends_the_step() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise OSError("as planned")

    model = nn.Sequential(nn.Linear(4, 4), Fails())
    lowtide.fit(model, budget="1 GiB")
    with pytest.raises(OSError, match="as planned"):
        model(torch.randn(2, 4))
    assert current_recorder() is None
    assert innermost_mode() is None
    lowtide.unfit(model)


def test_an_exception_in_backward_ends_the_step() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            raise OSError("as planned")

    model = stack(3)
    x = torch.randn(8, 64)
    expected = run_step(model, (x,))
    lowtide.fit(model, budget="1 GiB", **DROP_ONLY)
    for _ in range(3):
        with pytest.raises(OSError, match="as planned"):
            Fails.apply(model(x)).sum().backward()
        assert not open_steps()
        assert current_recorder() is None
    for _ in range(3):
        assert_equal(expected, run_step(model, (x,)))
    lowtide.unfit(model)


def test_steps_without_a_backward_do_not_pile_up() -> None:
    model = stack(3)
    lowtide.fit(model, budget="1 GiB", **DROP_ONLY)
    for _ in range(5):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # so recording ends with the call
            model(torch.randn(4, 64))
        gc.collect()
    assert len(open_steps()) == 1
    lowtide.unfit(model)
    assert not open_steps()


def test_the_model_is_the_same_object_with_the_same_state() -> None:
    model = stack(2)
    keys, hooks = list(model.state_dict()), len(model._forward_hooks) + len(model._forward_pre_hooks)
    attributes = set(vars(model))
    assert lowtide.fit(model, budget="1 GiB") is model
    assert list(model.state_dict()) == keys
    assert set(vars(model)) == attributes
    x = torch.randn(3, 64)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(other(x), model(x))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    assert lowtide.unfit(model) is model
    assert len(model._forward_hooks) + len(model._forward_pre_hooks) == hooks
    with pytest.raises(lowtide.ArgumentError, match="not fitted"):
        lowtide.report(model)


def test_no_state_remains() -> None:
    model = stack(3)
    lowtide.fit(model, budget="1 GiB")
    model(torch.randn(4, 64)).sum().backward()
    lowtide.unfit(model)
    gc.collect()
    current_runtime().backward.end_if_done()  # values of other tests
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward  # type: ignore[attr-defined]
    assert not open_steps()


def test_no_state_remains_of_a_model_that_was_freed() -> None:
    model = lowtide.fit(stack(3), budget="1 GiB")
    model(torch.randn(4, 64)).sum().backward()
    del model
    gc.collect()
    current_runtime().backward.end_if_done()  # values of other tests
    torch.ones(1, requires_grad=True).sum().backward()  # the next backward pass notices
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lowtide.fit(stack(1)), "needs a budget or a plan"),
        (lambda: lowtide.fit("model", budget="1 GiB"), "torch.nn.Module"),  # type: ignore[type-var]
        (lambda: lowtide.fit(stack(1), budget=0.5), "unit"),  # type: ignore[arg-type]
        (lambda: lowtide.report(stack(1)), "not fitted"),
    ],
)
def test_invalid_arguments_are_explained(call: Any, message: str) -> None:
    with pytest.raises(lowtide.ArgumentError, match=message):
        call()


def test_the_smallest_budget_that_an_error_names_works() -> None:
    """Also for the profiled step, which has no memory to verify the largest ops."""
    model, batch = deep.build("llama")
    plain = run_step(model, batch)
    limit = smallest_limit(model, batch)
    for step in fitted_steps(model, batch, limit):
        assert_equal(plain, step)
        assert step.peak_bytes <= limit
    assert lowtide.report(model).online_steps == 1
    lowtide.unfit(model)


def test_the_report_of_a_planned_step_has_details(tmp_path: Path) -> None:
    model = stack()
    lowtide.fit(model, budget=tight(model), **DROP_ONLY)
    with pytest.raises(lowtide.ArgumentError, match="two steps with the same signature"):
        lowtide.report(model).details()
    model(torch.randn(512, 64)).sum().backward()
    assert lowtide.report(model).measured_step_s is None
    assert "step time" not in str(lowtide.report(model))
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(512, 64)).sum().backward()
    report = lowtide.report(model)
    assert len(report.planned_seconds) == report.steps - report.online_steps == 3
    assert report.measured_step_s == statistics.median(report.planned_seconds)
    assert f"{format_time(report.measured_step_s)} measured, median of 3" in str(report)
    details = report.details()
    assert details.plan is report.plan
    assert details.predicted_peak_bytes == details.plan.predicted_peak_bytes
    assert details.measured_peak_bytes == report.measured_peak_bytes
    details.save_html(tmp_path / "step.html")
    assert "<svg" in (tmp_path / "step.html").read_text()
    lowtide.unfit(model)


def test_gradient_checkpointing_of_the_model_is_a_warning() -> None:
    model, _ = zoo.build("gpt2")
    model.gradient_checkpointing_enable()
    with pytest.warns(lowtide.LowtideWarning, match="gradient_checkpointing_disable"):
        lowtide.fit(model, budget="1 GiB")
    model.gradient_checkpointing_disable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.fit(model, budget="1 GiB")
    lowtide.unfit(model)
