"""Several losses of one forward pass, each with its own backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .models import WIDTH, mlp, simple_mlp
from .training import Fit, Training, scenario

ROWS = 384


class Heads(nn.Module):
    """A trunk with several heads."""

    def __init__(self, heads: int, trunk: int = 5, depth: int = 3) -> None:
        super().__init__()
        self.trunk = mlp(trunk)
        self.heads = nn.ModuleList(mlp(depth) for _ in range(heads))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.trunk(x)
        return [head(x) for head in self.heads]


@scenario(simple_mlp(11, ROWS))
def two_losses(fit: Fit, scale: int) -> Training:
    """The first backward pass retains the graph for the second one."""
    torch.manual_seed(0)
    model = fit(Heads(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        first, second = model(x)
        loss1, loss2 = first.square().mean(), second.abs().mean()
        loss1.backward(retain_graph=True)
        loss2.backward()
        optimizer.step()
        return loss1.detach(), loss2.detach()

    return Training(step, [model])


@scenario(simple_mlp(14, ROWS))
def three_losses(fit: Fit, scale: int) -> Training:
    """Three backward passes through the trunk; three models share the budget."""
    torch.manual_seed(0)
    trunk, heads = fit(mlp(5)), [fit(mlp(3)) for _ in range(3)]
    parameters: list[Any] = [*trunk.parameters(), *(p for head in heads for p in head.parameters())]
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        hidden = trunk(x)
        losses = [head(hidden).sub(i).square().mean() for i, head in enumerate(heads)]
        for loss in losses[:-1]:
            loss.backward(retain_graph=True)
        losses[-1].backward()
        optimizer.step()
        return [loss.detach() for loss in losses]

    return Training(step, [trunk, *heads])


@scenario(simple_mlp(11, ROWS))
def gradient_norms(fit: Fit, scale: int) -> Training:
    """Balances two losses by the norms of their gradients at the trunk, from `autograd.grad`."""
    torch.manual_seed(0)
    model = fit(Heads(2))
    assert isinstance(model, Heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)
    shared = model.trunk[-1].weight

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        first, second = model(x)
        losses = first.square().mean(), second.abs().mean()
        norms = [torch.autograd.grad(loss, shared, retain_graph=True)[0].norm() for loss in losses]
        loss = losses[0] + losses[1] * (norms[0] / norms[1])
        loss.backward()
        optimizer.step()
        return loss.detach(), *norms

    return Training(step, [model])
