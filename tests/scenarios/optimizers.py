"""Optimizers: inside backward, with closures, after several batches, with state created in the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .models import WIDTH, mlp, simple_mlp
from .training import Fit, Training, scenario

ROWS = 512


@scenario(simple_mlp(8, ROWS))
def optimizer_in_backward(fit: Fit, scale: int) -> Training:
    """Each parameter is updated, and its gradient freed, as soon as its gradient is accumulated."""
    torch.manual_seed(0)
    model = fit(mlp(8))
    optimizers = {p: torch.optim.SGD([p], lr=1e-2, momentum=0.9) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        loss = model(x).square().mean()
        loss.backward()
        return (loss.detach(),)

    return Training(step, [model])


@scenario(simple_mlp(6, ROWS))
def lbfgs(fit: Fit, scale: int) -> Training:
    """One optimizer step calls forward and backward several times."""
    torch.manual_seed(0)
    model = fit(mlp(6))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=2)
    x, y = torch.randn(ROWS * scale, WIDTH), torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        losses: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            losses.append(loss.detach())
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
        return losses

    return Training(step, [model])


@scenario(simple_mlp(8, ROWS))
def accumulation(fit: Fit, scale: int) -> Training:
    """Gradients of four batches are added up before the optimizer step."""
    torch.manual_seed(0)
    model = fit(mlp(8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randn(4, ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        for batch in batches:
            loss = model(batch).square().mean() / len(batches)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return losses

    return Training(step, [model])


def simple_wide(scale: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return mlp(6, 128), (torch.randn(768 * scale, 128),)


def _adam(fit: Fit, scale: int, *, passed: bool) -> Training:
    torch.manual_seed(0)
    model = mlp(6, 128)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    fit(model, **({"optimizer": optimizer} if passed else {}))
    x = torch.randn(768 * scale, 128)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


@scenario(simple_wide)
def adam_state(fit: Fit, scale: int) -> Training:
    """The first optimizer step creates a tenth of all memory, after the first step was profiled."""
    return _adam(fit, scale, passed=False)


@scenario(simple_wide)
def adam_passed(fit: Fit, scale: int) -> Training:
    """The same with the optimizer passed to `fit`."""
    return _adam(fit, scale, passed=True)
