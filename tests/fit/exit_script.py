"""Trains in 20 forked processes at the same time, and prints the exit statuses. Run by `test_exit.py`."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch._dynamo  # slow, and imported by DDP: here it is imported once
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide

PROCESSES = 20


def mlp() -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))))


def train(path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    x = torch.randn(512, 64)
    sharded = mlp()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    fitted, parallel = lowtide.fit(mlp(), budget="6 MiB"), DistributedDataParallel(mlp())
    for _ in range(2):
        fitted(x).square().mean().backward()
    with lowtide.budget("64 MiB"):
        loss = parallel(x).square().mean()
    loss.backward()
    with lowtide.saving(lowtide.EveryN(1)):
        loss = sharded(x).square().mean()
    loss.backward()


def main() -> None:
    children = []
    directory = tempfile.mkdtemp()
    for i in range(PROCESSES):
        child = os.fork()
        if not child:
            train(os.path.join(directory, str(i)))
            sys.exit(0)  # with all the work of a normal exit
        children.append(child)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])


if __name__ == "__main__":
    main()
