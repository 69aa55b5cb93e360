"""Which module calls begin a training step. Unsupported models still train correctly."""

from __future__ import annotations

import copy
import io
import pickle
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.fitting import registry
from lowtide.fitting.steps import fitting_state
from lowtide.runner.settings import Settings
from lowtide.runner.step_finder import StepFinder
from tests.runtimes import current_recorder


@pytest.fixture
def finder() -> Iterator[StepFinder]:
    """An installed step finder with a budget that is never exceeded."""
    finder = StepFinder(Settings(2**40))
    uninstall = finder.install()
    yield finder
    uninstall()
    for _, fitted in finder.fitted:
        fitted.close()


def mlp(depth: int = 4, width: int = 16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())))


def fitted_names(finder: StepFinder) -> list[str]:
    return [name for name, _ in finder.fitted]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal_results(train: Callable[[], list[torch.Tensor]]) -> StepFinder:
    """Train with and without a step finder, and compare the returned tensors. Return the finder."""
    expected = train()
    finder = StepFinder(Settings(2**40))
    uninstall = finder.install()
    try:
        actual = train()
    finally:
        uninstall()
    assert expected
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    return finder


class KeywordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) * scale).square().mean()}


def test_first_call_is_a_step_and_keyword_arguments_work(finder: StepFinder) -> None:
    model = KeywordModel()
    for rows in (8, 8, 8, 16, 16):
        model(x=torch.randn(rows, 16), scale=2.0)["loss"].backward()
        model.zero_grad()
    ((name, fitted),) = finder.fitted
    assert name == "KeywordModel"
    assert (fitted.steps, fitted.online_steps, len(fitted.families)) == (5, 2, 1)  # two sizes


def test_inference_frozen_models_and_losses_are_not_steps(finder: StepFinder) -> None:
    model, x = mlp(), torch.randn(3, 16)
    frozen = mlp().requires_grad_(False)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model.eval()(x)
    frozen(x.requires_grad_()).sum().backward()
    nn.CrossEntropyLoss()(x, torch.tensor([0, 1, 2])).backward()
    assert fitted_names(finder) == []


def test_head_called_after_the_model_belongs_to_the_same_step(finder: StepFinder) -> None:
    """Also in later steps, which run without a recorder because everything fits."""
    model, head = mlp(), nn.Linear(16, 4)
    for _ in range(12):
        nn.CrossEntropyLoss()(head(model(torch.randn(3, 16))), torch.tensor([0, 1, 2])).backward()
    assert fitted_names(finder) == ["Sequential"]
    assert head.weight.grad is not None


def test_model_called_in_two_parts_is_one_step(finder: StepFinder) -> None:
    first, second = mlp(2), mlp(3, seed=1)
    for _ in range(3):
        second(first(torch.randn(3, 16))).sum().backward()
        first.zero_grad()
        second.zero_grad()
    ((_, fitted),) = finder.fitted
    assert (fitted.steps, fitted.online_steps) == (3, 1)


def test_gan_with_two_models() -> None:
    """Both networks are fitted, although the critic is called during a step that the generator has begun."""

    def gan() -> list[torch.Tensor]:
        generator, critic = mlp(3), mlp(2, seed=1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, critic)]
        rng = torch.Generator().manual_seed(2)
        for _ in range(4):
            real, noise = torch.randn(2, 8, 16, generator=rng)
            optimizers[1].zero_grad()
            fake = generator(noise)
            (critic(real).mean() - critic(fake.detach()).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(fake).mean().backward()
            optimizers[0].step()
        return [p.detach() for m in (generator, critic) for p in m.parameters()]

    finder = assert_equal_results(gan)
    assert [(fitted.steps, fitted.online_steps) for _, fitted in finder.fitted] == [(4, 2), (4, 2)]


def test_torch_checkpoints_are_not_separate_steps() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(mlp(2, seed=k) for k in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def train() -> list[torch.Tensor]:
        model = Checkpointed()
        for _ in range(3):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        return gradients(model)

    assert fitted_names(assert_equal_results(train)) == ["Checkpointed"]


def test_compiled_model_is_compiled_once() -> None:
    from torch._dynamo.utils import counters

    graphs = []

    def train() -> list[torch.Tensor]:
        torch.compiler.reset()
        counters.clear()
        model = torch.compile(mlp(3), backend="aot_eager")
        for _ in range(3):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
        return gradients(model)

    assert fitted_names(assert_equal_results(train)) == ["OptimizedModule"]
    assert graphs == [1, 1]


def test_torch_func_transforms_are_skipped() -> None:
    def train() -> list[torch.Tensor]:
        model = mlp(2)
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
        model(x).sum().backward()
        sample_grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        results = [*sample_grads.values(), torch.func.vmap(model)(x).detach()]
        model(x).sum().backward()
        return [*results, *gradients(model)]

    ((_, fitted),) = assert_equal_results(train).fitted
    assert fitted.steps == 2


def test_model_traced_by_torch_jit() -> None:
    def train() -> list[torch.Tensor]:
        traced = torch.jit.trace(mlp(2), torch.ones(2, 16))
        traced(torch.ones(4, 16)).square().sum().backward()
        return gradients(traced)

    assert_equal_results(train)


def test_lazy_modules_are_fitted_after_initialisation(finder: StepFinder) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    for _ in range(3):
        model(torch.randn(4, 5)).sum().backward()
        model.zero_grad()
    ((_, fitted),) = finder.fitted
    assert fitted.steps == 2


def test_sharded_parameters_are_skipped(finder: StepFinder) -> None:
    from torch.distributed.fsdp import fully_shard

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        model = fully_shard(mlp(2), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        with pytest.warns(lowtide.LowtideWarning, match=r"Sequential trains without a budget.*sharded"):
            model(torch.ones(2, 16)).sum().backward()
        model(torch.ones(2, 16)).sum().backward()  # no second warning
    finally:
        dist.destroy_process_group()
    assert fitted_names(finder) == []


def test_meta_and_fake_models_are_skipped(finder: StepFinder) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        model = mlp(2)
    model(torch.ones(2, 16, device="meta")).sum().backward()
    with FakeTensorMode():
        mlp(2)(torch.ones(2, 16)).sum().backward()
    assert fitted_names(finder) == []


def test_copies_and_pickles_are_unchanged(finder: StepFinder) -> None:
    model = mlp(2)
    before, attributes = pickle.dumps(model), set(vars(model))
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        model.zero_grad()
    assert pickle.dumps(model) == before
    assert set(vars(model)) == attributes
    saved = io.BytesIO()
    torch.save(model, saved)
    assert b"lowtide" not in saved.getvalue()
    twin = copy.deepcopy(model)
    twin(torch.ones(2, 16)).sum().backward()
    assert [fitted.steps for _, fitted in finder.fitted] == [2, 1]


def test_script_catches_a_keyboard_interrupt(finder: StepFinder) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nn.Sequential(nn.Linear(16, 16), Interrupted())(torch.ones(2, 16))
    assert current_recorder() is None
    model = mlp()
    model(torch.ones(2, 16)).sum().backward()
    assert registry.state_of(model).steps == 1


def test_training_inside_an_exception_handler(finder: StepFinder) -> None:
    model = mlp()
    try:
        raise MemoryError
    except MemoryError:  # scripts retry here with a smaller batch
        for _ in range(3):
            model(torch.ones(2, 16)).sum().backward()
            model.zero_grad()
    fitted = registry.state_of(model)
    assert (fitted.steps, fitted.online_steps) == (3, 1)


def test_script_calls_fit_itself(finder: StepFinder) -> None:
    model = lowtide.fit(mlp(), budget="1 GiB")
    other = mlp()
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        other(torch.ones(2, 16)).sum().backward()
    lowtide.fit(other, budget="1 GiB")
    other(torch.ones(2, 16)).sum().backward()
    assert [lowtide.report(m).steps for m in (model, other)] == [2, 1]
    assert [lowtide.report(m).budget_bytes for m in (model, other)] == [2**30, 2**30]
    assert [fitted.steps for _, fitted in finder.fitted] == [2]
    lowtide.unfit(model)
    lowtide.unfit(other)


def test_error_in_lowtide_does_not_stop_the_script(finder: StepFinder) -> None:
    class Batch(NamedTuple):
        x: torch.Tensor

        def __iter__(self) -> Any:
            raise LookupError("expected")

    class Odd(nn.Linear):
        def forward(self, batch: Batch) -> torch.Tensor:
            return super().forward(batch.x)

    model = Odd(16, 16)
    with pytest.warns(lowtide.LowtideWarning, match="Odd trains without a budget.*LookupError: expected"):
        model(Batch(torch.ones(2, 16))).sum().backward()
    assert current_recorder() is None
    assert fitting_state().running == []
    assert gradients(model)
    model(Batch(torch.ones(2, 16))).sum().backward()


def test_budget_error_reaches_the_script() -> None:
    finder = StepFinder(Settings(1000))
    uninstall = finder.install()
    model = mlp()
    try:
        with pytest.raises(lowtide.BudgetError, match="parameters and data already use"):
            model(torch.ones(2, 16))
    finally:
        uninstall()
        lowtide.unfit(model)
    assert current_recorder() is None


def test_step_counts_of_freed_models_are_kept(finder: StepFinder) -> None:
    for _ in range(12):
        mlp(1)(torch.ones(2, 16)).sum().backward()
    assert [fitted.steps for _, fitted in finder.fitted] == [1] * 12
    assert sum(bool(fitted.families) for _, fitted in finder.fitted) < 12
