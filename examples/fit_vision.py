"""Train a small ResNet with batch norm and gradient accumulation in less than half of its memory.

    python examples/fit_vision.py [--share 0.45] [--steps 4]

Trains the same network twice: with plain PyTorch, and fitted to a share of the plain peak. Losses, weights and batch
norm statistics are compared bit by bit. A difference ends the script with an error.
"""

from __future__ import annotations

import argparse
import gc

import torch
from torch import nn

import lowtide
from lowtide.profiling.peak_meter import PeakMeter

MICRO_BATCHES, ROWS = 4, 8


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(x + self.body(x))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [Residual(16) for _ in range(5)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Run a training loop without any code for lowtide."""
    data = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            images = torch.randn(ROWS, 3, 32, 32, generator=data)
            labels = torch.randint(0, 10, (ROWS,), generator=data)
            loss = nn.functional.cross_entropy(model(images), labels) / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def train_plain(steps: int) -> tuple[list[float], dict[str, torch.Tensor], int]:
    model, optimizer = make()
    with PeakMeter(model.parameters()) as meter:
        losses = train(model, optimizer, steps)
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}, meter.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.45, help="budget as a share of the plain peak")
    parser.add_argument("--steps", type=int, default=4, help=f"optimizer steps of {MICRO_BATCHES} micro-batches each")
    options = parser.parse_args()
    torch.set_num_threads(1)

    losses, state, plain_peak = train_plain(options.steps)
    gc.collect()
    held = sum(tensor.nbytes for tensor in state.values())  # the budget counts this copy too

    model, optimizer = make()
    lowtide.fit(model, budget=int(options.share * plain_peak) + held, optimizer=optimizer)  # the added line
    ours = train(model, optimizer, options.steps)

    report = lowtide.report(model)
    print(report)
    print(f"\nplain peak     {plain_peak / 2**20:.1f} MiB")
    print(f"fitted peak    {((report.measured_peak_bytes or 0) - held) / 2**20:.1f} MiB, measured by lowtide")
    equal = losses == ours and all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    print(f"losses, weights and statistics bit-equal: {equal}")
    if not equal:
        raise SystemExit("the fitted run differs from the plain run")


if __name__ == "__main__":
    main()
