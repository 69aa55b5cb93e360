"""torch_remat (Meta): checkpoints around blocks, inside of which some calls keep what they need. Optional."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.pytorch_utils import Conv1D

from .base import NotApplicableError, Variant
from .blocks import blocks
from .steps import Bench, Forward

_TENSOR = object()
PRODUCTS = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)


class Remat(Variant):
    """`remat.checkpoint(region_name=...)` around every block, `remat.region(recompute=False)` around products in it.

    As its documentation has it: one checkpoint for each block; calls to be kept are annotated, and what they give is
    marked by `recompute_needs_tensor`, as ops outside of regions read it; the generator's state is put back by a
    `RecomputeStateHook` where blocks have dropout. Models are not edited: modules that are a matrix product or a
    convolution get the annotation around their forward. Attention that is a function, and no module, cannot be kept
    so, and is recomputed.
    """

    family = "torch remat"

    def prepare(self, bench: Bench) -> None:
        try:
            import torch_remat  # noqa: F401
        except ImportError as error:
            raise NotApplicableError("torch_remat is not installed: pip install torch_remat") from error
        there = blocks(bench.model)
        if not there:
            raise NotApplicableError(f"{type(bench.model).__name__} has no blocks to put a checkpoint on")
        kept = sum(isinstance(module, PRODUCTS) for block in there for module in block.modules())
        self.note = f"{len(there)} blocks checkpointed, {kept} modules of products in them kept, the rest recomputed"

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        wrapped: list[Any] = []
        try:
            for number, block in enumerate(blocks(bench.model)):
                inside = {name: module for name, module in block.named_modules() if isinstance(module, PRODUCTS)}
                for name, module in inside.items():
                    _replace(wrapped, module, _kept(module.forward, name))
                _replace(wrapped, block, _checkpointed(block, f"blocks.{number}"))
            yield bench.loss
        finally:
            for module in wrapped:
                del module.forward


def _replace(wrapped: list[Any], module: Any, forward: Callable[..., Any]) -> None:
    module.forward = forward
    wrapped.append(module)


class GeneratorState:
    """The CPU generator, for `recompute_state_hooks`: torch_remat has no such hook of its own."""

    def snapshot(self) -> torch.Tensor:
        return torch.get_rng_state()

    def restore(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def _kept(forward: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    import torch_remat as remat

    region = remat.region(forward, name, recompute=False)

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = region(*args, **kwargs)
        remat.recompute_needs_tensor(out)
        return out

    return called


def _checkpointed(block: nn.Module, name: str) -> Callable[..., Any]:
    """The block's forward under a checkpoint, which gives tensors only: what else it gives is put back beside them."""
    import torch_remat as remat

    draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in block.modules())
    options = {"recompute_state_hooks": (GeneratorState(),)} if draws else {}
    forward = block.forward

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        shape: list[Any] = []

        def tensors(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            leaves, spec = tree_flatten(forward(*args, **kwargs))
            shape[:] = [[_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec]
            return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

        found = iter(remat.checkpoint(region_name=name, **options)(tensors)(*args, **kwargs))
        others, spec = shape
        return tree_unflatten([next(found) if other is _TENSOR else other for other in others], spec)

    return called
