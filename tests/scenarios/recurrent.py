"""Recurrent nets and reinforcement learning: many small ops, a different number of them in each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .training import Fit, Training, scenario

HIDDEN = 64
OBSERVED = 16


class Chain(nn.Module):
    """An LSTM cell that is called once per time step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(OBSERVED, HIDDEN)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[1], HIDDEN)
        for item in x:
            h, c = self.cell(item, (h, c))
        return self.head(h)


def simple_chain(scale: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the chain itself: it has one forward and one backward per step."""
    torch.manual_seed(0)
    return Chain(), (torch.randn(60 * scale, 64, OBSERVED),)


@scenario(simple_chain, steps=6, bench_scale=4)
def lstm_cell(fit: Fit, scale: int) -> Training:
    """A chain of small ops: 60 time steps, 240 in the benchmark."""
    torch.manual_seed(0)
    model = fit(Chain())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(60 * scale, 64, OBSERVED)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


def policy_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(OBSERVED, HIDDEN), nn.Tanh(), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(),
        nn.Linear(HIDDEN, 4),
    )  # fmt: skip


class Episode(nn.Module):
    """The policy, called for each observation of an episode."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = policy_net()

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.policy(one) for one in observations])


def simple_episode(scale: int) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Episode(), (torch.randn(16, 160 * scale, OBSERVED),)


LENGTHS = (12, 18, 15, 20, 12, 18, 15, 20, 13, 19, 16, 20, 20, 20)


@scenario(simple_episode, steps=14, settled_after=8, period=len(LENGTHS))
def reinforce(fit: Fit, scale: int) -> Training:
    """REINFORCE: the policy is called once per time step, the length of an episode differs."""
    torch.manual_seed(0)
    policy = fit(policy_net())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    environments = 160 * scale
    transition = torch.randn(4, OBSERVED) * 0.1

    def step(i: int) -> Sequence[torch.Tensor]:
        state = torch.randn(environments, OBSERVED)
        log_probabilities: list[torch.Tensor] = []
        rewards: list[torch.Tensor] = []
        for _ in range(LENGTHS[i % len(LENGTHS)]):
            distribution = torch.distributions.Categorical(logits=policy(state))
            action = distribution.sample()
            log_probabilities.append(distribution.log_prob(action))
            state = 0.9 * state + transition[action]
            rewards.append(-state.square().mean(1))
        future = torch.zeros(environments)
        returns: list[torch.Tensor] = []
        for reward in reversed(rewards):
            future = reward + 0.95 * future
            returns.insert(0, future)
        stacked = torch.stack(returns)
        advantage = (stacked - stacked.mean()) / stacked.std()
        loss = -(torch.stack(log_probabilities) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [policy])


def simple_gru(scale: int) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Unrolled(), (torch.randn(16, 128 * scale, OBSERVED), torch.zeros(128 * scale, HIDDEN))


class Unrolled(nn.Module):
    """A GRU cell over the time steps of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(OBSERVED, HIDDEN)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []
        for item in x:
            h = self.cell(item, h)
            outputs.append(self.head(h))
        return torch.stack(outputs)


@scenario(simple_gru)
def truncated(fit: Fit, scale: int) -> Training:
    """Truncated backpropagation through time: cell and head are called by the loop; the state goes on, detached."""
    torch.manual_seed(0)
    cell, head = fit(nn.GRUCell(OBSERVED, HIDDEN)), fit(nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=1e-2)
    x = torch.randn(16, 128 * scale, OBSERVED)
    state = {"h": torch.zeros(128 * scale, HIDDEN)}

    def step(_: int) -> Sequence[torch.Tensor]:
        h = state["h"]
        loss = torch.zeros(())
        for item in x:
            h = cell(item, h)
            loss = loss + head(h).sub(1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["h"] = h.detach()
        return (loss.detach(),)

    return Training(step, [cell, head])
