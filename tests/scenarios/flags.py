"""Flags that change between steps: `requires_grad`, training mode, autocast and gradient scaling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from .models import WIDTH, convnet, mlp, simple_convnet, simple_mlp
from .training import Fit, Training, scenario

ROWS = 512
IMAGES = 40


@scenario(simple_mlp(8, ROWS), steps=14, settled_after=10, period=6)
def freezing(fit: Fit, scale: int) -> Training:
    """The first layers are frozen in every other epoch of three steps."""
    torch.manual_seed(0)
    model = fit(mlp(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(i: int) -> Sequence[torch.Tensor]:
        model[:15].requires_grad_(i // 3 % 2 == 1)  # type: ignore[index]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


@scenario(simple_convnet(IMAGES), steps=14, settled_after=10, period=6, bench_scale=4)
def frozen_statistics(fit: Fit, scale: int) -> Training:
    """Batch norm layers are in evaluation mode in every other epoch of three steps."""
    torch.manual_seed(0)
    model = fit(convnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    images, labels = torch.randn(IMAGES * scale, 3, 16, 16), torch.randint(10, (IMAGES * scale,))

    def step(i: int) -> Sequence[torch.Tensor]:
        model.train()
        for part in model.modules():
            if isinstance(part, nn.BatchNorm2d) and i // 3 % 2 == 1:
                part.eval()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


@scenario(simple_convnet(IMAGES), bench_scale=4)
def validation(fit: Fit, scale: int) -> Training:
    """An evaluation under `no_grad` after each training step."""
    torch.manual_seed(0)
    model = fit(convnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    images, labels = torch.randn(IMAGES * scale, 3, 16, 16), torch.randint(10, (IMAGES * scale,))

    def step(_: int) -> Sequence[torch.Tensor]:
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            valid = F.cross_entropy(model(images[: IMAGES // 2]), labels[: IMAGES // 2])
        return loss.detach(), valid

    return Training(step, [model])


@scenario(simple_mlp(8, ROWS), steps=14, settled_after=10, period=6)
def autocast(fit: Fit, scale: int) -> Training:
    """Autocast to bfloat16 is on in every other epoch of three steps."""
    torch.manual_seed(0)
    model = fit(mlp(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(i: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=i // 3 % 2 == 1):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return (loss.detach(),)

    return Training(step, [model])


@scenario(simple_mlp(8, ROWS))
def gradient_scaling(fit: Fit, scale: int) -> Training:
    """Autocast with a gradient scaler, which unscales and clips gradients and whose scale grows."""
    torch.manual_seed(0)
    model = fit(mlp(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    x = torch.randn(ROWS * scale, WIDTH)

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return (loss.detach(),)

    return Training(step, [model])
