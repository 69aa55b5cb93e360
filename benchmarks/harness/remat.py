"""torch_remat (Meta) as a variant: checkpoints around blocks, in which some calls are not recomputed. Optional."""

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
KEPT_MODULES = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)


class Remat(Variant):
    """`remat.checkpoint(region_name=...)` around every block, `remat.region(recompute=False)` around modules in it.

    This follows torch_remat's documentation. Outputs of the regions are marked with `recompute_needs_tensor`, because
    ops outside of regions read them. A `RecomputeStateHook` restores the generator in blocks with dropout. The code
    of the models is not changed: linear and convolution modules get the region around their forward. Attention is a
    function, not a module, so it is recomputed.
    """

    family = "torch remat"

    def prepare(self, bench: Bench) -> None:
        try:
            import torch_remat  # noqa: F401
        except ImportError as error:
            raise NotApplicableError("torch_remat is not installed: pip install torch_remat") from error
        checkpointed = blocks(bench.model)
        if not checkpointed:
            raise NotApplicableError(f"{type(bench.model).__name__} has no blocks to checkpoint")
        kept = sum(isinstance(module, KEPT_MODULES) for block in checkpointed for module in block.modules())
        self.note = f"{len(checkpointed)} blocks checkpointed; outputs of {kept} linear and convolution modules saved"

    @contextlib.contextmanager
    def applied(self, bench: Bench) -> Iterator[Forward]:
        wrapped: list[Any] = []
        try:
            for number, block in enumerate(blocks(bench.model)):
                inside = {name: module for name, module in block.named_modules() if isinstance(module, KEPT_MODULES)}
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
    """State of the CPU generator, for `recompute_state_hooks`; torch_remat has no hook for it."""

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
    """Return the block's forward under a checkpoint.

    torch_remat accepts functions that return tensors only, so other parts of the output are added afterwards.
    """
    import torch_remat as remat

    has_dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in block.modules())
    options = {"recompute_state_hooks": (GeneratorState(),)} if has_dropout else {}
    forward = block.forward

    @functools.wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        structure: list[Any] = []

        def tensors(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            leaves, spec = tree_flatten(forward(*args, **kwargs))
            structure[:] = [[_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec]
            return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))

        tensor_outputs = iter(remat.checkpoint(region_name=name, **options)(tensors)(*args, **kwargs))
        others, spec = structure
        return tree_unflatten([next(tensor_outputs) if other is _TENSOR else other for other in others], spec)

    return called
