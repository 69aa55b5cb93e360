"""PyTorch's own tools as variants, each set up as its documentation recommends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .base import NotApplicableError, Variant
from .blocks import each_block_checkpointed, segments_checkpointed
from .steps import Bench, Forward

ATEN = torch.ops.aten
SAVED_BY_SAC = {
    ATEN.mm.default,
    ATEN.addmm.default,
    ATEN.bmm.default,
    ATEN.baddbmm.default,
    ATEN._grouped_mm.default,
    ATEN.convolution.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_attention_math.default,
}
"""Matrix products, convolutions and attention."""


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_BY_SAC else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINT: dict[str, Any] = {"use_reentrant": False}
SELECTIVE: dict[str, Any] = CHECKPOINT | {
    "context_fn": functools.partial(create_selective_checkpoint_contexts, save_products)
}


class EachBlock(Variant):
    """`torch.utils.checkpoint` on every block, with `use_reentrant=False`.

    Models of transformers use `gradient_checkpointing_enable`; in others the forward of each block is wrapped.
    """

    family = "torch checkpoint"
    options = CHECKPOINT

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        with each_block_checkpointed(bench.model, self.options):
            yield bench.loss


class Selective(EachBlock):
    """Selective checkpointing of every block, with `create_selective_checkpoint_contexts` as `context_fn`.

    The policy of PyTorch's documentation: `MUST_SAVE` for matrix products and attention, here also for convolutions,
    and `PREFER_RECOMPUTE` for all other ops.
    """

    family = "torch SAC"
    options = SELECTIVE


class SqrtSegments(Variant):
    """One checkpoint around every √n consecutive blocks, as `checkpoint_sequential` does for an `nn.Sequential`."""

    family = "torch checkpoint"

    def prepare(self, bench: Bench) -> None:
        try:
            with segments_checkpointed(bench.model, CHECKPOINT):
                pass
        except LookupError as error:
            raise NotApplicableError(str(error)) from error

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        with segments_checkpointed(bench.model, CHECKPOINT):
            yield bench.loss


class SaveOnCpu(Variant):
    """`torch.autograd.graph.save_on_cpu` around the forward pass.

    On a CPU no tensor moves, so this measures the cost of the hooks only. `pin_memory` is off, because it serves
    copies from an accelerator.
    """

    family = "torch offload"

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        def forward() -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu(pin_memory=False):
                return bench.loss()

        yield forward
