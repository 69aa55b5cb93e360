"""Recipes: one op each that can be replayed, with references to values instead of tensors."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from ..ops.rng import Draw
from .value import Origin, Tensor, Value
from .view import Ref


class Scratch:
    """An argument that a replayed op overwrites completely: fresh memory of the same geometry."""

    __slots__ = ("device", "dtype", "nbytes", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.nbytes = tensor.untyped_storage().nbytes()
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype


class Write(NamedTuple):
    """One storage that an in-place op writes."""

    target: Ref | Scratch
    """The written argument."""
    made: weakref.ref[Value] | None
    """The value that the storage holds afterwards."""
    exclusive: bool
    """No other recipe or handle uses the overwritten value, so a replay may overwrite it too (Rule 6)."""


class Recipe:
    """One op that can be replayed."""

    __slots__ = ("args", "draw", "grad_enabled", "kwargs", "made", "origin", "refs", "writes")

    args: list[Any]
    refs: list[Ref]
    """All references among the arguments."""
    made: list[tuple[int, weakref.ref[Value]]]
    """New storages: position among the results, and the value."""

    def __init__(self, origin: Origin, draw: Draw | None) -> None:
        self.origin = origin
        self.draw = draw
        self.grad_enabled = torch.is_grad_enabled()
        self.kwargs: dict[str, Any] | None = None
        self.writes: tuple[Write, ...] = ()
