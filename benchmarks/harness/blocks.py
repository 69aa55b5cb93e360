"""Blocks of a model that get a checkpoint, and lists of blocks that run one after the other."""

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
from .unets import DiffusionUNet, DoubleConv, ResidualBlock, UNet

OWN_BLOCKS = (RecurrentBlock, ResidualBlock, DoubleConv)
NOT_SEQUENTIAL = (UNet, DiffusionUNet)  # skip connections pass over other blocks
T5_BIASES = {2: 1, 5: 2}  # position of a T5 block's argument: position in the output of the previous block


def is_block(module: nn.Module) -> bool:
    """Return whether the module gets a checkpoint."""
    is_resnet_block = type(module).__name__ == "ResNetBottleNeckLayer"
    return is_resnet_block or isinstance(module, (GradientCheckpointingLayer, *OWN_BLOCKS))


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return all blocks, in the order of the module tree."""
    return [module for module in model.modules() if is_block(module)]


def block_lists(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return owner and attribute name of each list of blocks that run one after the other."""
    if isinstance(model, NOT_SEQUENTIAL):
        return []
    return [
        (owner, name)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1 and all(map(is_block, child))
    ]


class Segment(nn.Module):
    """Consecutive blocks under one checkpoint."""

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
    """Return the arguments of the next block."""
    if isinstance(out, torch.Tensor):
        return (out, *args[1:])
    next_args = [out[0], *args[1:]]
    for argument, output in T5_BIASES.items():
        if out[output] is not None:
            next_args[argument] = out[output]
    return tuple(next_args)


@contextlib.contextmanager
def each_block_checkpointed(model: nn.Module, options: dict[str, Any]) -> Iterator[None]:
    """Checkpoint every block, by `gradient_checkpointing_enable` if the model has it, otherwise around its forward.

    Raises `LookupError` for a model without blocks.
    """
    if getattr(model, "supports_gradient_checkpointing", False):
        switch: Any = model
        hooks = {module: set(module._forward_hooks) for module in model.modules()}
        switch.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        try:
            yield
        finally:
            switch.gradient_checkpointing_disable()
            for module, before in hooks.items():  # transformers leaves a hook on the embedding
                for key in module._forward_hooks.keys() - before:
                    del module._forward_hooks[key]
        return
    wrapped: list[Any] = blocks(model)
    if not wrapped:
        raise LookupError(f"{type(model).__name__} has no blocks to checkpoint")
    for block in wrapped:
        block.forward = functools.partial(checkpoint, block.forward, **options)
    try:
        yield
    finally:
        for block in wrapped:
            del block.forward


@contextlib.contextmanager
def segments_checkpointed(model: nn.Module, options: dict[str, Any]) -> Iterator[None]:
    """Checkpoint segments of √n blocks in every list of n blocks; raise `LookupError` if there is no such list."""
    lists = block_lists(model)
    if not lists:
        raise LookupError(f"the blocks of {type(model).__name__} do not run one after the other: no segments")
    before = [(owner, name, getattr(owner, name)) for owner, name in lists]
    try:
        for owner, name, blocks_in_list in before:
            members = list(blocks_in_list)
            size = max(1, round(len(members) ** 0.5))
            segments = [Segment(members[i : i + size], options) for i in range(0, len(members), size)]
            kind = type(blocks_in_list)
            setattr(owner, name, kind(*_constructor_arguments(kind, segments)))
        yield
    finally:
        for owner, name, blocks_in_list in before:
            setattr(owner, name, blocks_in_list)


def _constructor_arguments(kind: type, parts: list[Segment]) -> list[Any]:
    return [parts] if issubclass(kind, nn.ModuleList) else list(parts)
