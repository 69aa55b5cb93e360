"""Saved tensors that backward does not unpack, or that other code holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .models import WIDTH, mlp, simple_mlp
from .training import Fit, Training, scenario

ROWS = 512


@scenario(simple_mlp(8, ROWS), settled_after=5)
def stored_loss(fit: Fit, scale: int) -> Training:
    """A metric that is never differentiated is stored with its graph for two steps, as in a common leak."""
    torch.manual_seed(0)
    model = fit(mlp(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)
    history: deque[torch.Tensor] = deque(maxlen=2)

    def step(_: int) -> Sequence[torch.Tensor]:
        metric = model(x[: len(x) // 4]).abs().mean()
        history.append(metric)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), metric.detach()

    return Training(step, [model])


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.auxiliary = mlp(4), mlp(2), mlp(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.head(x), self.auxiliary(x)


@scenario(simple_mlp(9, ROWS), settled_after=5)
def unused_head(fit: Fit, scale: int) -> Training:
    """The output of a head is not used in the loss, and stays alive until the next step."""
    torch.manual_seed(0)
    model = fit(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)
    held: dict[str, torch.Tensor] = {}

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        held["output"], held["auxiliary"] = model(x)
        loss = held["output"].square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


@scenario(simple_mlp(8, ROWS))
def partial_backward(fit: Fit, scale: int) -> Training:
    """Backward stops before the first layers, whose saved tensors are never unpacked."""
    torch.manual_seed(0)
    model = fit(mlp(8))
    last = list(model[12:].parameters())  # type: ignore[index]
    optimizer = torch.optim.SGD(last, lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward(inputs=last)
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


class HiddenStates(nn.Module):
    """Returns all hidden states. A linear layer without bias on three dims returns a result of `_unsafe_view`."""

    def __init__(self, depth: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        states: list[torch.Tensor] = []
        for i, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            projected = layer(x)
            if i % 3 == 0:
                states.append(projected)
            x = norm(F.gelu(projected)) + x
        return [*states, x]


def simple_hidden(scale: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)

    class Last(HiddenStates):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x)[-1]

    return Last(), (torch.randn(16 * scale, 32, WIDTH),)


@scenario(simple_hidden)
def hidden_states(fit: Fit, scale: int) -> Training:
    """The loop holds hidden states, views made by `_unsafe_view`, until the next step."""
    torch.manual_seed(0)
    model = fit(HiddenStates())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(16 * scale, 32, WIDTH)
    held: dict[str, list[torch.Tensor]] = {}

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        held["states"] = model(x)
        loss = held["states"][-1].square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


def simple_deep(scale: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return deep_net(), (torch.randn(384 * scale, WIDTH),)


def deep_net() -> nn.Sequential:
    """Return a net in which most values can only be recomputed from far away."""
    layers = [m for _ in range(30) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Sigmoid())]
    return nn.Sequential(*layers)


@scenario(simple_deep)
def long_chain(fit: Fit, scale: int) -> Training:
    """A chain of 90 ops, of which the first step recomputes long parts."""
    torch.manual_seed(0)
    model = fit(deep_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(384 * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])
