"""Which calls begin a training step, in scripts of all kinds; whatever is odd still trains, and rightly."""

from __future__ import annotations

import copy
import io
import pickle
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.fitting import registry
from lowtide.runner.settings import Settings
from lowtide.runner.step_finder import StepFinder
from tests.runtimes import current_recorder


@pytest.fixture
def finder() -> Iterator[StepFinder]:
    """A finder that is installed, with a budget that is large enough for anything here."""
    finder = StepFinder(Settings(2**40))
    undo = finder.install()
    yield finder
    undo()
    for _, state in finder.fitted:
        state.close()


def stack(depth: int = 4, width: int = 16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.Tanh())))


def names(finder: StepFinder) -> list[str]:
    return [name for name, _ in finder.fitted]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(train: Callable[[], list[torch.Tensor]]) -> StepFinder:
    """Train plainly and with a finder; both must give the same tensors."""
    expected = train()
    finder = StepFinder(Settings(2**40))
    undo = finder.install()
    try:
        found = train()
    finally:
        undo()
    assert expected
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return finder


class WithKeywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = stack()

    def forward(self, *, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) * scale).square().mean()}


def test_the_first_call_is_a_step_already_also_with_keywords(finder: StepFinder) -> None:
    model = WithKeywords()
    for rows in (8, 8, 8, 4, 4):
        model(x=torch.randn(rows, 16), scale=2.0)["loss"].backward()
        model.zero_grad()
    ((name, state),) = finder.fitted
    assert name == "WithKeywords"
    assert (state.steps, state.online_steps, len(state.families)) == (5, 2, 2)


def test_what_is_no_step(finder: StepFinder) -> None:
    model, x = stack(), torch.randn(3, 16)
    frozen = stack().requires_grad_(False)
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    model.eval()(x)
    frozen(x.requires_grad_()).sum().backward()
    nn.CrossEntropyLoss()(x, torch.tensor([0, 1, 2])).backward()
    assert names(finder) == []


def test_a_loss_with_parameters_belongs_to_the_step_of_the_model(finder: StepFinder) -> None:
    model, head = stack(), nn.Linear(16, 4)
    for _ in range(2):
        nn.CrossEntropyLoss()(head(model(torch.randn(3, 16))), torch.tensor([0, 1, 2])).backward()
    assert names(finder) == ["Sequential"]
    assert head.weight.grad is not None


def test_a_model_that_is_called_part_by_part(finder: StepFinder) -> None:
    first, second = stack(2), stack(3, seed=1)
    for _ in range(3):
        second(first(torch.randn(3, 16))).sum().backward()
        first.zero_grad()
        second.zero_grad()
    ((_, state),) = finder.fitted
    assert (state.steps, state.online_steps) == (3, 1)


def test_two_models_in_turn() -> None:
    def gan() -> list[torch.Tensor]:
        maker, critic = stack(3), stack(2, seed=1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (maker, critic)]
        generator = torch.Generator().manual_seed(2)
        for _ in range(4):
            real, noise = torch.randn(2, 8, 16, generator=generator)
            optimizers[1].zero_grad()
            made = maker(noise)
            (critic(real).mean() - critic(made.detach()).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(made).mean().backward()
            optimizers[0].step()
        return [p.detach() for m in (maker, critic) for p in m.parameters()]

    assert len(same(gan).fitted) == 2


def test_checkpoints_of_torch_are_no_steps_of_their_own() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(stack(2, seed=k) for k in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    def train() -> list[torch.Tensor]:
        model = Checkpointed()
        for _ in range(3):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        return gradients(model)

    assert names(same(train)) == ["Checkpointed"]


def test_a_compiled_model_is_compiled_once() -> None:
    from torch._dynamo.utils import counters

    graphs = []

    def train() -> list[torch.Tensor]:
        torch.compiler.reset()
        counters.clear()
        model = torch.compile(stack(3), backend="aot_eager")
        for _ in range(3):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(0))).square().sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
        return gradients(model)

    assert names(same(train)) == ["OptimizedModule"]
    assert graphs == [1, 1]


def test_transforms_of_torch_func_are_left_alone() -> None:
    def train() -> list[torch.Tensor]:
        model = stack(2)
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().sum()

        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
        model(x).sum().backward()
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
        made = [*each.values(), torch.func.vmap(model)(x).detach()]
        model(x).sum().backward()
        return [*made, *gradients(model)]

    ((_, state),) = same(train).fitted
    assert state.steps == 2


def test_a_model_that_is_traced_by_torch_jit() -> None:
    def train() -> list[torch.Tensor]:
        traced = torch.jit.trace(stack(2), torch.ones(2, 16))
        traced(torch.ones(4, 16)).square().sum().backward()
        return gradients(traced)

    same(train)


def test_lazy_modules_are_steps_once_they_know_their_shapes(finder: StepFinder) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    for _ in range(3):
        model(torch.randn(4, 5)).sum().backward()
        model.zero_grad()
    ((_, state),) = finder.fitted
    assert state.steps == 2


def test_sharded_parameters_are_left_alone(finder: StepFinder) -> None:
    from torch.distributed.fsdp import fully_shard

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        model = fully_shard(stack(2), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        with pytest.warns(lowtide.LowtideWarning, match=r"Sequential trains without a budget.*sharded"):
            model(torch.ones(2, 16)).sum().backward()
        model(torch.ones(2, 16)).sum().backward()  # said once
    finally:
        dist.destroy_process_group()
    assert names(finder) == []


def test_a_fake_model_is_left_alone(finder: StepFinder) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        model = stack(2)
    model(torch.ones(2, 16, device="meta")).sum().backward()
    with FakeTensorMode():
        stack(2)(torch.ones(2, 16)).sum().backward()
    assert names(finder) == []


def test_models_are_copied_and_saved_as_ever(finder: StepFinder) -> None:
    model = stack(2)
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
    assert [state.steps for _, state in finder.fitted] == [2, 1]


def test_an_interrupt_that_the_script_catches(finder: StepFinder) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nn.Sequential(nn.Linear(16, 16), Interrupted())(torch.ones(2, 16))
    assert current_recorder() is None
    model = stack()
    model(torch.ones(2, 16)).sum().backward()
    assert registry.state_of(model).steps == 1


def test_training_inside_an_exception_handler(finder: StepFinder) -> None:
    model = stack()
    try:
        raise MemoryError
    except MemoryError:  # as scripts do that try again with a smaller batch
        for _ in range(3):
            model(torch.ones(2, 16)).sum().backward()
            model.zero_grad()
    state = registry.state_of(model)
    assert (state.steps, state.online_steps) == (3, 1)


def test_a_model_that_the_script_fits_itself(finder: StepFinder) -> None:
    model = lowtide.fit(stack(), budget="1 GiB")
    other = stack()
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        other(torch.ones(2, 16)).sum().backward()
    lowtide.fit(other, budget="1 GiB")
    other(torch.ones(2, 16)).sum().backward()
    assert [lowtide.report(m).steps for m in (model, other)] == [2, 1]
    assert [lowtide.report(m).budget_bytes for m in (model, other)] == [2**30, 2**30]
    assert [state.steps for _, state in finder.fitted] == [2]
    lowtide.unfit(model)
    lowtide.unfit(other)


def test_what_goes_wrong_in_lowtide_does_not_stop_the_script(finder: StepFinder) -> None:
    class Odd(nn.Sequential):
        def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
            raise LookupError("as planned")

    model = Odd(nn.Linear(16, 16))
    with pytest.warns(lowtide.LowtideWarning, match="Odd trains without a budget.*LookupError: as planned"):
        model(torch.ones(2, 16)).sum().backward()
    assert current_recorder() is None
    assert gradients(model)
    model(torch.ones(2, 16)).sum().backward()


def test_a_budget_that_cannot_be_held_reaches_the_script() -> None:
    finder = StepFinder(Settings(1000))
    undo = finder.install()
    model = stack()
    try:
        with pytest.raises(lowtide.BudgetError, match="before the first op needs"):
            model(torch.ones(2, 16))
    finally:
        undo()
        lowtide.unfit(model)
    assert current_recorder() is None


def test_models_that_are_gone_leave_their_counts(finder: StepFinder) -> None:
    for _ in range(12):
        stack(1)(torch.ones(2, 16)).sum().backward()
    assert [state.steps for _, state in finder.fitted] == [1] * 12
    assert sum(bool(state.families) for _, state in finder.fitted) < 12
