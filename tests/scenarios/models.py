"""Models that several scenarios train. Activations are most of their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 64


def mlp(depth: int, width: int = WIDTH, activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Return `depth` times Linear, activation, LayerNorm."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), activation(), nn.LayerNorm(width)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def blocks(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(count)])


def convnet(channels: int = 8, depth: int = 4) -> nn.Sequential:
    """Return convolutions with batch norm and ReLU, and a classifier of ten classes."""
    layers: list[nn.Module] = []
    inputs = 3
    for _ in range(depth):
        layers += [nn.Conv2d(inputs, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
        inputs = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def simple_mlp(depth: int, rows: int, activation: Callable[[], nn.Module] = nn.GELU) -> Any:
    """Return the builder of a simple loop with an MLP and a batch of `rows` per unit of scale."""

    def build(scale: int) -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        return mlp(depth, activation=activation), (torch.randn(rows * scale, WIDTH),)

    return build


def simple_blocks(batch: int, count: int = 3, length: int = 32) -> Any:
    """Return the builder of a simple loop with transformer blocks."""

    def build(scale: int) -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        return blocks(count), (torch.randn(batch * scale, length, WIDTH),)

    return build


def simple_convnet(batch: int, depth: int = 4) -> Any:
    """Return the builder of a simple loop with a convolutional net."""

    def build(scale: int) -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        return convnet(depth=depth), (torch.randn(batch * scale, 3, 16, 16),)

    return build
