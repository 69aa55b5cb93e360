"""Two U-Nets. Their long skip connections pass values of the first layers to the last ones."""

from __future__ import annotations

import itertools

import torch
from torch import nn


class DoubleConv(nn.Sequential):
    """Two convolutions, each with batch norm and an activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """A U-Net for segmentation."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first = DoubleConv(3, widths[0])
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(DoubleConv(2 * a, a) for a, _ in reversed(pairs))
        self.last = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [self.first(x)]
        for block in self.down:
            kept.append(block(nn.functional.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), kept.pop()], 1))
        out: torch.Tensor = self.last(x)
        return out


class Segmenter(UNet):
    """A U-Net with its loss: four classes for each pixel."""

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return nn.functional.cross_entropy(super().forward(pixel_values), labels)


class ResidualBlock(nn.Module):
    """Residual block of a diffusion model: twice group norm, SiLU and convolution, with the timestep added between."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(times, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(nn.functional.silu(self.norm1(x)))
        h = h + self.time(nn.functional.silu(time))[:, :, None, None]
        out: torch.Tensor = self.skip(x) + self.conv2(nn.functional.silu(self.norm2(h)))
        return out


class PixelAttention(nn.Module):
    """Attention between all pixels of a small image."""

    def __init__(self, channels: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, channels)
        self.to_qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        flat = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.to_qkv(flat).reshape(b, h * w, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        out: torch.Tensor = self.out(mixed)
        return x + out.transpose(1, 2).reshape(b, c, h, w)


class DiffusionUNet(nn.Module):
    """Predict the noise in noisy images, as DDPM does, with attention at the lowest resolution."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.times = 4 * widths[0]
        pairs = list(itertools.pairwise(widths))
        self.embed = nn.Sequential(nn.Linear(self.times, self.times), nn.SiLU(), nn.Linear(self.times, self.times))
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(ResidualBlock(a, a, self.times) for a in widths[:-1])
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairs)
        self.middle = nn.ModuleList(ResidualBlock(widths[-1], widths[-1], self.times) for _ in range(2))
        self.attention = PixelAttention(widths[-1])
        self.grow = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in reversed(pairs))
        self.join = nn.ModuleList(ResidualBlock(2 * a, a, self.times) for a, _ in reversed(pairs))
        self.last = nn.Sequential(nn.GroupNorm(8, widths[0]), nn.SiLU(), nn.Conv2d(widths[0], 3, 3, padding=1))

    def forward(self, noisy: torch.Tensor, noise: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(self.times // 2) * (-9.2 / (self.times // 2)))
        angles = timestep[:, None] * rates[None]
        time = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        x, kept = self.first(noisy), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(block(x, time))
            x = shrink(kept[-1])
        x = self.middle[1](self.attention(self.middle[0](x, time)), time)
        for grow, join in zip(self.grow, self.join, strict=True):
            x = join(torch.cat([grow(nn.functional.interpolate(x, scale_factor=2.0)), kept.pop()], 1), time)
        return nn.functional.mse_loss(self.last(x), noise)
