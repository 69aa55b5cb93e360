"""Train under one memory budget in three ways: recompute, exact codecs, and a disk.

    python examples/offload_to_disk.py [--share 0.4] [--directory DIR]

`lowtide.budget` needs no plan. Evicted values are recomputed, compressed, or written to a private file and prefetched
before backward unpacks them. The gradients of each way are compared bit by bit with those of plain PyTorch.
"""

from __future__ import annotations

import argparse
import gc
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.profiling.peak_meter import PeakMeter
from lowtide.stores import DiskStore

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.relu(self.wide(self.norm(x))), 0.1, self.training)
        return x + self.narrow(hidden)


def train(model: nn.Module, x: torch.Tensor, scope: Any) -> list[torch.Tensor]:
    """Return the sum of the gradients of a few steps."""
    model.zero_grad()
    torch.manual_seed(3)  # for dropout
    for _ in range(STEPS):
        with scope():
            loss = model(x).square().mean()
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.4, help="budget as a share of the plain peak")
    parser.add_argument("--directory", help="directory of the spill file; default: the directory for temporary files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(8)))
    x = torch.randn(2048, 128)

    with PeakMeter([*model.parameters(), x]) as meter:
        expected = train(model, x, nullcontext)
    model.zero_grad()
    gc.collect()
    held = sum(gradient.nbytes for gradient in expected)  # the budget counts these gradients too
    limit = int(options.share * meter.peak_bytes) + held
    print(f"plain peak {meter.peak_bytes / 2**20:.1f} MiB, budget {(limit - held) / 2**20:.1f} MiB")

    with DiskStore(options.directory) as disk:
        ways: dict[str, dict[str, Any]] = {
            "recompute only": {"codecs": None},
            "exact codecs": {"codecs": "exact"},
            "disk": {"stores": disk, "codecs": None},
        }
        for name, how in ways.items():
            ours = train(model, x, lambda how=how: lowtide.budget(limit, **how))
            report = lowtide.report()
            equal = all(torch.equal(a, b) for a, b in zip(expected, ours, strict=True))
            print(f"\n{name}: {report.replayed_ops} ops replayed, gradients bit-equal: {equal}\n{report.budget}")
            if not equal or report.budget is None or report.budget.peak_bytes > limit:
                raise SystemExit(f"{name}: the gradients differ or the budget was exceeded")
            del ours


if __name__ == "__main__":
    main()
