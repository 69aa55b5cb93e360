"""DDP and FSDP2 over gloo with two processes: exact, or an error that says what to do."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import lowtide

Job = Callable[[int, torch.Tensor], None]


def build() -> nn.Module:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 16))
    return nn.Sequential(*(block() for _ in range(3)))


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone() for p in model.parameters()]


def step(model: nn.Module, x: torch.Tensor, scope: Any = None) -> list[torch.Tensor]:
    import contextlib

    torch.manual_seed(7 + dist.get_rank())
    model.zero_grad()
    with scope or contextlib.nullcontext():
        loss = model(x).square().mean()
    loss.backward()
    return grads(model)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def work_ddp(rank: int, x: torch.Tensor) -> None:
    for static in (False, True):
        model = nn.parallel.DistributedDataParallel(build(), static_graph=static)
        plain = step(model, x)
        for policy in (lowtide.EveryN(1), lowtide.KeepNone(), lowtide.Selective()):
            for _ in range(2):
                assert same(plain, step(model, x, lowtide.saving(policy)))
        assert lowtide.report().replayed_ops >= 0


def sharded() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = build()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def work_fsdp(rank: int, x: torch.Tensor) -> None:
    model = sharded()
    plain = step(model, x)
    for policy in (lowtide.KeepAll(), lowtide.EveryN(1), lowtide.SaveOps("addmm")):
        for _ in range(2):  # the second step uses the storages of the first, freed and gathered again
            assert same(plain, step(model, x, lowtide.saving(policy)))
    assert lowtide.report().replayed_ops > 0
    for crossing in (lowtide.KeepNone(), lowtide.EveryN(2)):
        with pytest.raises(
            lowtide.StaleSourceError, match=r"freed by FSDP.*EveryN\(1, layers=\[the wrapped modules\]\)"
        ):
            step(sharded(), x, lowtide.saving(crossing))


def work_collectives(rank: int, x: torch.Tensor) -> None:
    """Rule 12: a collective in forward is not repeated in backward."""
    from torch.distributed import _functional_collectives as functional

    w = torch.ones(16, requires_grad=True)

    def forward() -> torch.Tensor:
        y = (x * w).sin().detach()
        total = functional.all_reduce(y, "sum", dist.group.WORLD)
        return (total.exp() * w).tanh().sum()

    plain = torch.autograd.grad(forward(), w)[0]
    with lowtide.saving(lowtide.KeepNone()):
        loss = forward()
    if rank == 0:  # one process only: a repeated collective would wait forever
        assert torch.equal(torch.autograd.grad(loss, w)[0], plain)
    assert any("never replayed" in p.why for p in lowtide.report().pinned)
    dist.barrier()


def process(rank: int, port: int, job: Job) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
        job(rank, x)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # Threads of gloo sometimes abort a process that ends normally, also without lowtide.
    os._exit(0)


def two_processes(job: Job) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(process, (port, job), nprocs=2)


def test_ddp() -> None:
    two_processes(work_ddp)


def test_fsdp2() -> None:
    two_processes(work_fsdp)


def test_collectives_are_not_repeated() -> None:
    two_processes(work_collectives)
