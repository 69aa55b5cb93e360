"""Double backward: gradient penalties and a step of meta-learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from .models import WIDTH, mlp, simple_mlp
from .training import Fit, Training, scenario

ROWS = 384


def critic() -> nn.Sequential:
    return mlp(5, activation=nn.Tanh).append(nn.Linear(WIDTH, 1))


@scenario(simple_mlp(5, ROWS, nn.Tanh))
def wgan_gp(fit: Fit, scale: int) -> Training:
    """The critic of WGAN-GP: a penalty on the gradient at points between real and fake ones."""
    torch.manual_seed(0)
    model = fit(critic())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    real, fake = torch.randn(ROWS * scale, WIDTH), torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        score = model(fake).mean() - model(real).mean()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        output = model(between)
        (gradient,) = torch.autograd.grad(output, between, torch.ones_like(output), create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        loss = score + 10 * penalty
        loss.backward()
        optimizer.step()
        return score.detach(), penalty.detach()

    return Training(step, [model])


@scenario(simple_mlp(5, ROWS, nn.Tanh))
def r1_penalty(fit: Fit, scale: int) -> Training:
    """The R1 penalty: the gradient at real points, with its own backward pass."""
    torch.manual_seed(0)
    model = fit(critic())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    real, fake = torch.randn(ROWS * scale, WIDTH), torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        points = real.detach().requires_grad_()
        scores = model(points)
        loss = F.softplus(-scores).mean() + F.softplus(model(fake)).mean()
        loss.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
        penalty = gradient.square().sum(1).mean()
        (5 * penalty).backward()
        optimizer.step()
        return loss.detach(), penalty.detach()

    return Training(step, [model])


@scenario(simple_mlp(6, ROWS))
def maml(fit: Fit, scale: int) -> Training:
    """Two tasks; each takes one inner step, whose gradients keep their graph.

    With four layers, no plan can free 62 % of the plain peak in the backward pass of `outer`. In the formula of
    the last layer norm, three gradients of each layer before wait, and the formula holds 10 temporaries.
    """
    torch.manual_seed(0)
    model = fit(mlp(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    tasks = [tuple(torch.randn(ROWS * scale, WIDTH) for _ in range(2)) for _ in range(2)]

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        for support, query in tasks:
            weights: dict[str, Any] = dict(model.named_parameters())
            inner = model(support).square().mean()
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            outer = functional_call(model, adapted, (query,)).square().mean()
            outer.backward()
            losses.append(outer.detach())
        optimizer.step()
        return losses

    return Training(step, [model])
