"""Modules and their own tensors, without the generators of `nn.Module`, which take 3 % of a step of a deep model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def modules_of(root: nn.Module) -> list[nn.Module]:
    """Return `root` and all its descendants, each once."""
    found: dict[nn.Module, None] = {}
    pending = [root]
    while pending:
        module = pending.pop()
        if module not in found:
            found[module] = None
            pending.extend(child for child in module._modules.values() if child is not None)
    return list(found)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are registered on this module itself."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def own_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers that are registered on this module itself."""
    return [buffer for buffer in module._buffers.values() if buffer is not None]


def forward_pre_hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the forward pre-hooks of this module."""
    return list(module._forward_pre_hooks.values())


def remove_forward_hooks(module: nn.Module, kinds: tuple[type, ...]) -> None:
    """Remove the forward hooks and pre-hooks of these classes, for which there are no handles, as in a deep copy."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if isinstance(hook, kinds)]:
            del hooks[number]
            for flags in (
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks_with_kwargs,
                module._forward_hooks_always_called,
            ):
                flags.pop(number, None)
