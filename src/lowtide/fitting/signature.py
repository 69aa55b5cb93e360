"""Step signatures and sizes: steps with the same signature share profiles and plans, whatever their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..torch_compat import modules_of, own_parameters, shape_of, tree_leaves, version_of

Versions = dict[int, int]
"""By parameter, as its `id`: its version, which changes when it is written."""


class ModelState(NamedTuple):
    """What a plan depends on in a model, and the versions of its parameters."""

    training: bytes
    """By module: the `training` flag."""
    requires_grad: bytes
    """By parameter: the `requires_grad` flag."""
    has_gradients: bool
    """Whether a parameter has a gradient before the step."""
    versions: Versions

    @staticmethod
    def of(model: nn.Module) -> ModelState:
        """Return the present state of `model`."""
        training, requires_grad = bytearray(), bytearray()
        has_gradients = False
        versions: Versions = {}
        for module in modules_of(model):
            training.append(module.training)
            for parameter in own_parameters(module):
                requires_grad.append(parameter.requires_grad)
                has_gradients = has_gradients or (parameter.is_leaf and parameter.grad is not None)
                if not parameter.is_inference():  # these have no version
                    versions[id(parameter)] = version_of(parameter)
        return ModelState(bytes(training), bytes(requires_grad), has_gradients, versions)


class Signature(NamedTuple):
    """A step signature. Steps with different signatures have different plans."""

    inputs: tuple[tuple[tuple[bool, ...], torch.dtype, bool], ...]
    """By input tensor of the first call: which of its dimensions are 1, its dtype and `requires_grad`.

    Torch runs other ops for dimensions of size 1. Those of tensors in lists, such as boxes in images, rarely matter.
    """
    training: bytes
    """By module: the `training` flag."""
    requires_grad: bytes
    """By parameter: the `requires_grad` flag."""
    has_gradients: bool
    """Whether a parameter has a gradient before the step."""
    others: tuple[tuple[bytes, bytes, bool], ...]
    """The same three, for each of the other fitted models."""
    autocast: tuple[torch.dtype | None, ...]
    """By device type: the autocast dtype. None: autocast is disabled."""


def signature_of(
    state: ModelState, others: Iterable[ModelState], args: Any, kwargs: Any
) -> tuple[Signature, tuple[int, ...]]:
    """Return the signature of a step that begins with a call of a model in this state, and its sizes."""
    parts = [*args, *kwargs.values()]
    listed = {id(item) for found in _lists_of_tensors(parts) for item in found}
    inputs = tuple(
        (
            () if id(tensor) in listed else tuple(size == 1 for size in shape_of(tensor)),
            tensor.dtype,
            tensor.requires_grad,
        )
        for tensor in _tensors_of(parts)
    )
    others_states = tuple(other[:3] for other in others)
    return Signature(inputs, *state[:3], others_states, _autocast_state()), sizes_of(parts)


def sizes_of(batch: Any) -> tuple[int, ...]:
    """Return the dimensions of all tensors of a batch, then the largest ones in each list of tensors.

    Models pad lists, for example of images, to the largest dimensions. `batch` itself is not such a list.
    """
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    sizes = [size for tensor in _tensors_of(parts) for size in shape_of(tensor)]
    for found in _lists_of_tensors(parts if isinstance(parts, (list, tuple)) else ()):
        sizes += map(max, zip(*map(shape_of, found), strict=True))
    return tuple(sizes)


def _lists_of_tensors(parts: Sequence[Any]) -> list[Sequence[torch.Tensor]]:
    """Return the arguments that are lists of several tensors with the same number of dimensions."""
    return [
        part
        for part in parts
        if isinstance(part, (list, tuple))
        and len(part) > 1
        and all(isinstance(item, torch.Tensor) for item in part)
        and len({len(shape_of(item)) for item in part}) == 1
    ]


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _autocast_state() -> tuple[torch.dtype | None, ...]:
    """Return whether autocast is enabled, and its dtype, for the CPU and the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    device_types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return tuple(
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        for device_type in device_types
    )
