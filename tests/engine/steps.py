"""Run one training step, and compare all its observable results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.engine.memory.ledger import Ledger
from lowtide.torch_compat import tree_leaves
from tests.allocator import allocator_peak


@dataclass
class Step:
    loss: torch.Tensor
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    generator: torch.Tensor
    peak_bytes: int
    """Peak of torch's allocator, with the bytes of the model and its batch."""


Loss = Callable[[nn.Module, Any], torch.Tensor]


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model(**batch) if isinstance(batch, dict) else model(*batch))


def loss_of(out: Any) -> torch.Tensor:
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    first = next((t for t in tensors if t.requires_grad), None)
    if first is None:
        first = next(t for t in tree_leaves(list(out.values()) if hasattr(out, "values") else out) if t.requires_grad)
    return first.float().square().mean()


def run_step(
    model: nn.Module,
    batch: Any,
    scope: Any = None,
    loss: Loss = default_loss,
    backward_inside: bool = False,
    seed: int = 3,
) -> Step:
    """Run one step and restore the model afterwards."""
    before = {k: v.detach().clone() for k, v in [*model.named_buffers(), *model.named_parameters()]}
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    base = Ledger()
    base.count_all([*model.parameters(), *model.buffers(), *tree_leaves(batch)])
    with allocator_peak() as peak:
        with scope or contextlib.nullcontext():
            value = loss(model, batch)
            if backward_inside:
                value.backward()
        if not backward_inside:
            value.backward()
    result = Step(
        value.detach().clone(),
        {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()},
        {k: v.clone() for k, v in model.named_buffers()},
        torch.get_rng_state(),
        base.live_bytes + peak.rise_bytes,
    )
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for k, v in [*model.named_buffers(), *model.named_parameters()]:
            if k in before and v.shape == before[k].shape:
                v.copy_(before[k])
    return result


def assert_equal(plain: Step, ours: Step) -> None:
    """Assert that two steps are bit-equal except for the peak."""
    assert torch.equal(plain.loss, ours.loss)
    assert plain.grads.keys() == ours.grads.keys()
    for name, grad in plain.grads.items():
        other = ours.grads[name]
        assert (grad is None) == (other is None), name
        assert grad is None or other is None or torch.equal(grad, other), name
    for name, buffer in plain.buffers.items():
        assert torch.equal(buffer, ours.buffers[name]), name
    assert torch.equal(plain.generator, ours.generator)


def assert_close(plain: Step, ours: Step, share: float = 0.05) -> None:
    """Assert the same forward, and gradients within the error of a lossy codec."""
    assert torch.equal(plain.loss, ours.loss)
    assert plain.grads.keys() == ours.grads.keys()
    differ = 0
    largest = max(float(grad.norm()) for grad in plain.grads.values() if grad is not None)
    for name, grad in plain.grads.items():
        other = ours.grads[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert (grad - other).norm() <= share * grad.norm() + 0.002 * largest, name  # some should be zero
            differ += not torch.equal(grad, other)
    assert differ


def every_rule() -> dict[str, lowtide.Policy]:
    """Return one policy of each class, and some combinations."""
    return {
        "KeepAll": lowtide.KeepAll(),
        "KeepNone": lowtide.KeepNone(),
        "EveryN(1)": lowtide.EveryN(1),
        "EveryN(2)": lowtide.EveryN(2),
        "Selective": lowtide.Selective(),
        "Selective(5)": lowtide.Selective(min_cost_us=5),
        "SaveOps": lowtide.SaveOps(["mm", "addmm", "bmm", "convolution"]),
        "Segments": lowtide.Segments([(3, 40), (60, 61), (90, 200)]),
        "Segments.uniform": lowtide.Segments.uniform(100, 7),
        "EveryN | SaveOps": lowtide.EveryN(2) | lowtide.SaveOps("addmm"),
        "Selective & KeepAll": lowtide.Selective() & lowtide.KeepAll(),
    }
