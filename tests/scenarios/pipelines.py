"""Microbatches in the orders of pipelines: several forward passes are open at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .models import WIDTH, blocks, simple_blocks
from .training import Fit, Training, scenario

BATCH = 6
LENGTH = 32


def _pipeline(fit: Fit, scale: int, order: str) -> Training:
    """Run forward ("f") and backward ("b") passes of microbatches in the given order."""
    torch.manual_seed(0)
    model = fit(blocks(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = [torch.randn(BATCH * scale, LENGTH, WIDTH) for _ in range(order.count("f"))]

    def step(_: int) -> Sequence[torch.Tensor]:
        optimizer.zero_grad()
        waiting: list[torch.Tensor] = []
        losses: list[torch.Tensor] = []
        inputs = iter(batches)
        for kind in order:
            if kind == "f":
                waiting.append(model(next(inputs)).square().mean())
                losses.append(waiting[-1].detach())
            else:
                waiting.pop(0).backward()
        optimizer.step()
        return losses

    return Training(step, [model])


@scenario(simple_blocks(4 * BATCH))
def gpipe(fit: Fit, scale: int) -> Training:
    """All forward passes, then all backward passes."""
    return _pipeline(fit, scale, "ffffbbbb")


@scenario(simple_blocks(3 * BATCH))
def one_forward_one_backward(fit: Fit, scale: int) -> Training:
    """1F1B: forward and backward passes alternate once the pipeline is full."""
    return _pipeline(fit, scale, "ffbfbfbb")
