"""Values: the content of one storage at one version (Rule 3).

A value has a tensor, a recipe that recomputes it, or both. A value never holds its users. Lifetimes are plain
references (Rule 4): handle -> value -> recipe -> references -> values.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...torch_compat import shape_of, version_of, watched_alias
from ..ops.facts import OpFacts

if TYPE_CHECKING:
    from ..memory.eviction import Residency
    from .handles import Handle
    from .recipe import Recipe

Tensor = torch.Tensor

UNWATCHED = -1
"""Version of a tensor that only the engine can reach."""


class Location(NamedTuple):
    """A position in the model: the running module, and its layer."""

    path: str
    layer: int | None
    keeps_inputs: bool
    """Whether values made in other layers are kept once an op here reads them."""
    outside_layers: bool
    """Outside the layers of a model that has layers."""


class Origin:
    """The op that made a value, and the module it ran in."""

    __slots__ = ("facts", "location", "number")

    def __init__(self, number: int, facts: OpFacts, location: Location) -> None:
        self.number = number
        self.facts = facts
        self.location = location

    def __str__(self) -> str:
        where = f" in module {self.location.path!r}" if self.location.path else ""
        return f"{self.facts.name}{where} (op {self.number})"


class Value:
    """The content of one storage at one version."""

    __slots__ = (
        "__weakref__",
        "address",
        "alias",
        "blank",
        "counted",
        "held",
        "key",
        "n_references",
        "nbytes",
        "origin",
        "parts",
        "recipe",
        "recompute_us",
        "residency",
        "stride",
        "tensor",
        "version",
    )

    def __init__(self, origin: Origin | None, nbytes: int, recipe: Recipe | None) -> None:
        self.origin = origin  # None: a source
        self.nbytes = nbytes
        self.recipe = recipe  # None: kept, or already recomputed for good
        self.tensor: Tensor | None = None
        self.version = UNWATCHED
        self.address = 0
        self.n_references = 0  # recipes and handles that ever referred to it
        self.blank = False  # Rule 9: no recorded op has written it
        self.counted = False
        self.key = 0  # of the storage that it was first seen in, if it is a source or has a recipe
        self.held = False  # a plan holds it in memory from its first use on, and keeps its recipe
        self.alias: weakref.ref[Tensor] | None = None  # a tensor that autograd saved; held instead of a new alias
        self.recompute_us = 0.0
        self.stride: tuple[int, ...] | None = None
        self.parts: list[weakref.ref[Handle]] | None = None  # handles on a part of the storage
        self.residency: Residency | None = None  # only for values that may be evicted or moved

    def hold(self, tensor: Tensor, storage: torch.UntypedStorage, *, evictable: bool = False) -> None:
        """Hold the user's memory and watch it for writes (Rules 5 and 11). An `evictable` value keeps its recipe."""
        saved = None if self.alias is None else self.alias()
        held = self.tensor = watched_alias(tensor) if saved is None else saved
        self.version = version_or_unwatched(held)
        self.address = storage.data_ptr()
        if not evictable:
            self.recipe = None
            self.blank = False

    def own(self, tensor: Tensor, *, evictable: bool = False) -> None:
        """Hold memory that user code cannot reach: a copy, or the result of a replay."""
        self.tensor = tensor
        self.version = UNWATCHED
        if not evictable:
            self.recipe = None

    def release(self) -> None:
        """Free the memory. The content can be recomputed, fetched or decompressed."""
        self.tensor = None
        self.version = UNWATCHED
        self.alias = None

    def refer(self) -> None:
        """Count one more recipe or handle that refers to this value."""
        self.n_references += 1

    def changed(self) -> str | None:
        """Return how watched memory has changed since it was held, or None (Rule 11)."""
        tensor = self.tensor
        if self.version == UNWATCHED or tensor is None:
            return None
        if version_of(tensor) != self.version:
            return f"was modified in place (it is at version {version_of(tensor)}, forward used version {self.version})"
        storage = tensor.untyped_storage()
        # FSDP frees a gathered parameter after forward and gathers it into other memory before backward.
        regathered = self.origin is not None and self.origin.facts.regathers
        if storage.nbytes() != self.nbytes:
            if regathered:
                return "has been freed by FSDP until its own module's backward"
            return f"has another size ({storage.nbytes()} bytes, forward used {self.nbytes})"
        if storage.data_ptr() != self.address and not regathered:
            return "was moved to other memory"
        return None


def version_or_unwatched(tensor: Tensor) -> int:
    """Return the version of a tensor. Inference tensors have none: writes to them cannot reach autograd."""
    try:
        return version_of(tensor)
    except RuntimeError:
        if not tensor.is_inference():
            raise
        return UNWATCHED


def describe(tensor: Tensor) -> str:
    """Describe a tensor for error messages: 'a float32 tensor of shape (3, 4)'."""
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {shape_of(tensor)}"
