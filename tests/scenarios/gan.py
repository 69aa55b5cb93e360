"""GANs: two models with one budget, and several backward passes per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .models import WIDTH, mlp
from .training import Fit, Training, scenario

LATENT = 16


def same_size(channels: int, activation: nn.Module) -> list[nn.Module]:
    """Return two blocks that keep the size of an image.

    Without them, the images and one convolution with its workspace need 75 % of the plain peak: no plan can help.
    """
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), activation]
    return layers


def generator(width: int = 8) -> nn.Sequential:
    """Return the generator of pytorch/examples for images of 32 by 32 pixels, with more layers of equal size."""
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, width * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(width * 4), nn.ReLU(True),
        nn.ConvTranspose2d(width * 4, width * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 2), nn.ReLU(True),
        *same_size(width * 2, nn.ReLU(True)),
        nn.ConvTranspose2d(width * 2, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
        *same_size(width, nn.ReLU(True)),
        nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def discriminator(width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
        *same_size(width, nn.LeakyReLU(0.2, inplace=True)),
        nn.Conv2d(width, width * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 2), nn.LeakyReLU(0.2, inplace=True),
        *same_size(width * 2, nn.LeakyReLU(0.2, inplace=True)),
        nn.Conv2d(width * 2, width * 4, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 4),
        nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(width * 4, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
    )  # fmt: skip


def simple_dcgan(scale: int) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(generator(), discriminator()), (torch.randn(24 * scale, LATENT, 1, 1),)


@scenario(simple_dcgan, bench_scale=4)
def dcgan(fit: Fit, scale: int) -> Training:
    """The order of calls of pytorch/examples/dcgan."""
    torch.manual_seed(0)
    net_g, net_d = fit(generator()), fit(discriminator())
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCELoss()
    batch = 24 * scale
    real = torch.rand(batch, 3, 32, 32)

    def step(_: int) -> Sequence[torch.Tensor]:
        net_d.zero_grad()
        label = torch.full((batch,), 1.0)
        output = net_d(real).view(-1)
        loss_real = criterion(output, label)
        loss_real.backward()
        noise = torch.randn(batch, LATENT, 1, 1)
        fake = net_g(noise)
        label.fill_(0.0)
        output = net_d(fake.detach()).view(-1)
        loss_fake = criterion(output, label)
        loss_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        label.fill_(1.0)
        output = net_d(fake).view(-1)
        loss_g = criterion(output, label)
        loss_g.backward()
        optimizer_g.step()
        return loss_real.detach(), loss_fake.detach(), loss_g.detach()

    return Training(step, [net_g, net_d])


def simple_gan_mlp(scale: int) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(mlp(4), mlp(4)), (torch.randn(512 * scale, WIDTH),)


@scenario(simple_gan_mlp)
def gan_mlp(fit: Fit, scale: int) -> Training:
    """The generator runs first; its graph waits for its backward pass during the step of the discriminator."""
    torch.manual_seed(0)
    net_g, net_d = fit(mlp(4)), fit(mlp(4).append(nn.Linear(WIDTH, 1)))
    optimizer_g = torch.optim.SGD(net_g.parameters(), lr=1e-2)
    optimizer_d = torch.optim.SGD(net_d.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss()
    batch = 512 * scale
    real = torch.randn(batch, WIDTH)
    ones, zeros = torch.ones(batch, 1), torch.zeros(batch, 1)

    def step(_: int) -> Sequence[torch.Tensor]:
        fake = net_g(torch.randn(batch, WIDTH))
        optimizer_d.zero_grad()
        loss_d = criterion(net_d(real), ones) + criterion(net_d(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = criterion(net_d(fake), ones)
        loss_g.backward()
        optimizer_g.step()
        return loss_d.detach(), loss_g.detach()

    return Training(step, [net_g, net_d])
