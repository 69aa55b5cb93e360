"""Parameters that are not plain attributes of the model: replaced, added, shared, computed or copied ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from .models import WIDTH, blocks, mlp, simple_blocks, simple_mlp
from .training import Fit, Training, scenario

ROWS = 512
TOKENS = 256


@scenario(simple_mlp(8, ROWS))
def functional(fit: Fit, scale: int) -> Training:
    """The weights are outside of the model, which `functional_call` runs with them."""
    torch.manual_seed(0)
    model = fit(mlp(8))
    outside = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in model.parameters())
    weights: dict[str, Any] = dict(zip(dict(model.named_parameters()), outside, strict=True))
    optimizer = torch.optim.SGD(weights.values(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = functional_call(model, weights, (x,)).square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model, outside])


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(self.dropout(x), self.down), self.up)


@scenario(simple_blocks(16))
def lora(fit: Fit, scale: int) -> Training:
    """Hand-written LoRA layers in frozen transformer blocks."""
    torch.manual_seed(0)
    model = blocks().requires_grad_(False)
    for part in model:
        part.qkv, part.up, part.down = LowRank(part.qkv), LowRank(part.up), LowRank(part.down)
    fit(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    x = torch.randn(16 * scale, 32, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


@scenario(simple_blocks(16))
def peft_lora(fit: Fit, scale: int) -> Training:
    """LoRA layers of the package PEFT."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["qkv", "up", "down"])
    model = fit(peft.get_peft_model(blocks(), config))  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    x = torch.randn(16 * scale, 32, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


class Language(nn.Module):
    """A language model whose embedding is also the weight of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = blocks(2)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


@scenario(simple_blocks(16, 2))
def tied_weights(fit: Fit, scale: int) -> Training:
    """Embedding and head share a weight, whose gradient comes from both."""
    torch.manual_seed(0)
    model = fit(Language())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.randint(TOKENS, (16 * scale, 33))

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


def _parametrized(fit: Fit, scale: int, parametrize: Any) -> Training:
    torch.manual_seed(0)
    model = mlp(8)
    for part in model:
        if isinstance(part, nn.Linear):
            parametrize(part)
    fit(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


@scenario(simple_mlp(8, ROWS))
def weight_norm(fit: Fit, scale: int) -> Training:
    """Weights are computed from a direction and a length in each forward pass."""
    return _parametrized(fit, scale, parametrizations.weight_norm)


@scenario(simple_mlp(8, ROWS))
def spectral_norm(fit: Fit, scale: int) -> Training:
    """Weights are divided by their norm; each forward pass changes the buffers of the power iteration."""
    return _parametrized(fit, scale, parametrizations.spectral_norm)


@scenario(simple_mlp(8, ROWS))
def deep_copy(fit: Fit, scale: int) -> Training:
    """A copy of a fitted model is trained. The copy is fitted too."""
    torch.manual_seed(0)
    original = fit(mlp(8))
    model = copy.deepcopy(original)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [original, model], reported=[model])
