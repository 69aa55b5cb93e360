"""Which parts of a model its users would checkpoint: the blocks, and the lists in which they follow each other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from .models import RecurrentBlock
from .unets import DiffusionUNet, TimedResidual, Twice, UNet

OURS = (RecurrentBlock, TimedResidual, Twice)
NOT_IN_A_ROW = (UNet, DiffusionUNet)  # what one block makes skips over others
T5_BIASES = {2: 1, 5: 2}  # argument of a T5 block: result of the block before it


def is_block(module: nn.Module) -> bool:
    named = type(module).__name__ == "ResNetBottleNeckLayer"
    return named or isinstance(module, (GradientCheckpointingLayer, *OURS))


def blocks(model: nn.Module) -> list[nn.Module]:
    """Every block, in the order of the module tree."""
    return [module for module in model.modules() if is_block(module)]


def rows_of_blocks(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Owner and attribute of each list of blocks that are called one after the other."""
    if isinstance(model, NOT_IN_A_ROW):
        return []
    return [
        (owner, name)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1 and all(map(is_block, child))
    ]


class Segment(nn.Module):
    """Some blocks as one, under one checkpoint."""

    def __init__(self, members: list[nn.Module], options: dict[str, Any]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.options = options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(self._run, **kwargs), *args, **self.options)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        out: Any = None
        for member in self.members:
            out = member(*args, **kwargs)
            args = _next_arguments(args, out)
        return out


def _next_arguments(args: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
    if isinstance(out, torch.Tensor):
        return (out, *args[1:])
    following = [out[0], *args[1:]]
    for place, result in T5_BIASES.items():
        if out[result] is not None:
            following[place] = out[result]
    return tuple(following)


@contextlib.contextmanager
def each_block_checkpointed(model: nn.Module, options: dict[str, Any]) -> Iterator[None]:
    """By the model's own switch where transformers has one, and around each block's forward elsewhere."""
    if getattr(model, "supports_gradient_checkpointing", False):
        switch: Any = model
        hooks = {module: set(module._forward_hooks) for module in model.modules()}
        switch.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        try:
            yield
        finally:
            switch.gradient_checkpointing_disable()
            for module, before in hooks.items():  # it leaves one on the embedding each time
                for key in module._forward_hooks.keys() - before:
                    del module._forward_hooks[key]
        return
    wrapped: list[Any] = blocks(model)
    if not wrapped:
        raise LookupError(f"{type(model).__name__} has no blocks to put a checkpoint on")
    for block in wrapped:
        block.forward = functools.partial(checkpoint, block.forward, **options)
    try:
        yield
    finally:
        for block in wrapped:
            del block.forward


@contextlib.contextmanager
def segments_checkpointed(model: nn.Module, options: dict[str, Any]) -> Iterator[None]:
    """√n blocks in each segment, in every row of n blocks."""
    rows = rows_of_blocks(model)
    if not rows:
        raise LookupError(f"the blocks of {type(model).__name__} do not follow each other, so they make no segments")
    before = [(owner, name, getattr(owner, name)) for owner, name in rows]
    try:
        for owner, name, row in before:
            members = list(row)
            size = max(1, round(len(members) ** 0.5))
            cut = [members[i : i + size] for i in range(0, len(members), size)]
            setattr(owner, name, type(row)(*_as_given(type(row), [Segment(part, options) for part in cut])))
        yield
    finally:
        for owner, name, row in before:
            setattr(owner, name, row)


def _as_given(kind: type, parts: list[Segment]) -> list[Any]:
    return [parts] if issubclass(kind, nn.ModuleList) else list(parts)
