"""Train a tiny model with DistributedDataParallel under `torchrun`. Rank 0 prints losses and gradient norms."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = (m for _ in range(6) for m in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)))
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    for step in range(6):
        x = torch.randn(512, 64)
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            norm = sum(p.grad.double().square().sum() for p in model.parameters())
            print(f"step {step}: loss {total.item()!r}, norm {norm.item()!r}", flush=True)
    dist.barrier()  # gloo sometimes aborts if one rank exits before the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
