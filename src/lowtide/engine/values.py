"""Values, the recipes that make them, and the handles that autograd holds instead of tensors.

A `Value` is the content of one storage at one version (Rule 3). It has a tensor, or a `Recipe` that makes
one; never a way back to who wants it. Lifetimes are plain references (Rule 4): handle → value → recipe →
references → values. Nothing here runs an op; that is `replay`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._errors import ReplayMismatchError, StaleSourceError
from .effects import OpFacts
from .randomness import Draw
from .torch_private import new_alias, storage_key, version_of, watched_alias, watched_alias_above_kernels

if TYPE_CHECKING:
    from .eviction import Seat

Tensor = torch.Tensor

UNWATCHED = -1  # the version of a tensor that only the engine can reach


class Place(NamedTuple):
    """A position in the model."""

    path: str
    layer: int | None
    keeps_inputs: bool
    """Whether values made in other layers are kept once something here reads them."""
    outside_layers: bool
    """Outside the layers of a model that has some."""


class Origin:
    """Which op made a value, and where."""

    __slots__ = ("facts", "number", "place")

    def __init__(self, number: int, facts: OpFacts, place: Place) -> None:
        self.number = number
        self.facts = facts
        self.place = place

    def __str__(self) -> str:
        where = f" in module {self.place.path!r}" if self.place.path else ""
        return f"{self.facts.name}{where} (op {self.number})"


class Value:
    """The content of one storage at one version."""

    __slots__ = (
        "__weakref__",
        "address",
        "alias",
        "blank",
        "claims",
        "counted",
        "nbytes",
        "origin",
        "recipe",
        "recompute_us",
        "seat",
        "stride",
        "tensor",
        "version",
    )

    def __init__(self, origin: Origin | None, nbytes: int, recipe: Recipe | None) -> None:
        self.origin = origin  # None: it came from outside
        self.nbytes = nbytes
        self.recipe = recipe  # None: kept, or already made again
        self.tensor: Tensor | None = None
        self.version = UNWATCHED  # when it was held, or, by a recorder that does not see every op, noted
        self.address = 0
        self.claims = 0  # how many recipes and handles have ever referred to it
        self.blank = False  # Rule 9: no recorded op has written it
        self.counted = False
        self.alias: weakref.ref[Tensor] | None = None  # one that autograd saved, to hold instead of a new one
        self.recompute_us = 0.0
        self.stride: tuple[int, ...] | None = None
        self.seat: Seat | None = None  # for values that may be evicted

    def hold(self, tensor: Tensor, storage: torch.UntypedStorage, *, for_now: bool = False) -> None:
        """Hold the user's memory from now on, and watch it (Rules 5 and 11); `for_now` it can still be made again."""
        saved = None if self.alias is None else self.alias()
        held = self.tensor = watched_alias(tensor) if saved is None else saved
        self.version = version_if_counted(held)
        self.address = storage.data_ptr()
        if not for_now:
            self.recipe = None
            self.blank = False

    def own(self, tensor: Tensor, *, for_now: bool = False) -> None:
        """Hold memory that nobody else can reach: a copy, or what a replay made."""
        self.tensor = tensor
        self.version = UNWATCHED
        if not for_now:
            self.recipe = None

    def let_go(self) -> None:
        """Hold its memory no longer: the content can be made again, or is kept elsewhere."""
        self.tensor = None
        self.version = UNWATCHED
        self.alias = None

    def changed(self) -> str | None:
        """What happened to watched memory since it was held, or None (Rule 11)."""
        tensor = self.tensor
        if self.version == UNWATCHED or tensor is None:
            return None
        if version_of(tensor) != self.version:
            return f"was modified in place (it is at version {version_of(tensor)}, forward used version {self.version})"
        storage = tensor.untyped_storage()
        # FSDP frees a gathered parameter after forward and gathers it again, elsewhere, before backward.
        regathered = self.origin is not None and self.origin.facts.regathers
        if storage.nbytes() != self.nbytes:
            if regathered:
                return "has been freed by FSDP until its own module's backward"
            return f"has another size ({storage.nbytes()} bytes, forward used {self.nbytes})"
        if storage.data_ptr() != self.address and not regathered:
            return "was moved to other memory"
        return None


class Ref:
    """A view of a value, as an op took it or as autograd saved it: which value, in which geometry."""

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "stride", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        self.value = value
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        dtype = self.dtype = tensor.dtype
        self.neg = tensor.is_neg()
        self.conj = dtype.is_complex and tensor.is_conj()

    def is_all_of(self, base: Tensor) -> bool:
        """Whether it is `base` as it stands."""
        return (
            base.dtype is self.dtype
            and base.size() == self.size
            and base.stride() == self.stride
            and base.storage_offset() == self.offset
            and base.is_neg() == self.neg
            and (not self.dtype.is_complex or base.is_conj() == self.conj)
        )

    def over(self, base: Tensor) -> Tensor:
        """This view over the memory of `base`, which has the value's content. To be called below autograd."""
        return base if self.is_all_of(base) else self.laid_over(base)

    def laid_over(self, base: Tensor) -> Tensor:
        """`over`, where it is not all of `base`."""
        if base.dtype is self.dtype and not (base.is_neg() or base.is_conj() or base.is_quantized):
            try:  # six times as fast as a new tensor
                tensor = base.as_strided(self.size, self.stride, self.offset)
            except RuntimeError as error:
                raise _does_not_fit(self.size, self.stride, self.offset, base.untyped_storage().nbytes()) from error
        else:
            tensor = view_of(base, self.dtype, self.size, self.stride, self.offset)
        if self.conj:
            tensor = torch.conj(tensor)
        if self.neg:
            tensor = torch._neg_view(tensor)
        return tensor


def view_of(
    base: Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt
) -> Tensor:
    """A tensor of this geometry over `base`'s storage; an error where the storage is too small.

    `Tensor.set_` would grow the storage instead, and give garbage.
    """
    if base.is_quantized:
        raise ReplayMismatchError("a view of a quantised tensor cannot be made from its bytes: keep what uses it")
    storage = base.untyped_storage()
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else offset - 1
    if (last + 1) * dtype.itemsize > storage.nbytes():
        raise _does_not_fit(size, stride, offset, storage.nbytes())
    return torch.empty(0, dtype=dtype, device=base.device).set_(storage, offset, size, stride)


def _does_not_fit(
    size: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt, nbytes: int
) -> ReplayMismatchError:
    return ReplayMismatchError(
        f"a view of {tuple(size)} with strides {stride} at offset {offset} does not fit into {nbytes} bytes: its "
        f"storage was freed or replaced since forward"
    )


def flat(tensor: Tensor) -> Tensor:
    """All of the memory behind `tensor`, as one row of its elements."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        return tensor.detach().view(-1)
    dtype = tensor.dtype if storage.nbytes() % tensor.itemsize == 0 else torch.uint8
    return view_of(tensor, dtype, torch.Size((storage.nbytes() // dtype.itemsize,)), (1,), 0)


class Scratch:
    """Where an op writes during replay without caring what was there: fresh memory of the same geometry."""

    __slots__ = ("device", "dtype", "nbytes", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.nbytes = tensor.untyped_storage().nbytes()
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype


class Write(NamedTuple):
    """One storage that an in-place op writes: through which argument, and which value that makes."""

    target: Ref | Scratch
    made: weakref.ref[Value] | None
    alone: bool
    """No one but this op wants what is overwritten, so replay may overwrite it too (Rule 6)."""


class Recipe:
    """One op that can be run again: its arguments with references in place of tensors."""

    __slots__ = ("args", "draw", "grad_enabled", "kwargs", "made", "origin", "refs", "writes")

    args: list[Any]
    refs: list[Ref]
    """All the references among the arguments, for following them."""
    made: list[tuple[int, weakref.ref[Value]]]
    """The new storages: position among the results, and the value."""

    def __init__(self, origin: Origin, draw: Draw | None) -> None:
        self.origin = origin
        self.draw = draw
        self.grad_enabled = torch.is_grad_enabled()
        self.kwargs: dict[str, Any] | None = None
        self.writes: tuple[Write, ...] = ()


class Kept:
    """A handle on a tensor that simply stays: what plain autograd does, with its check of the version."""

    __slots__ = ("__weakref__", "origin", "tensor", "version")

    def __init__(self, tensor: Tensor, origin: Origin | None) -> None:
        # An output comes with its history, which holds this handle: held as it is, it would never be freed.
        if tensor.is_leaf:
            self.tensor = tensor
        else:
            self.tensor = new_alias(tensor) if type(tensor) is Tensor else watched_alias_above_kernels(tensor)
        self.version = version_of(tensor)
        self.origin = origin

    def unpack(self) -> Tensor:
        """The tensor, if it is still what was saved (Rule 11; hooks switch off torch's own check)."""
        if version_of(self.tensor) != self.version:
            made = f", made by {self.origin}," if self.origin is not None else ""
            raise StaleSourceError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{describe(self.tensor)}{made} is at version {version_of(self.tensor)}; "
                f"version {self.version} was saved for backward. Modify a copy, or modify it after backward."
            )
        return self.tensor


class StorageEntry(weakref.ref[torch.UntypedStorage]):
    """A row of the table of live storages: a weak reference to one, with the value it has now (Rule 3).

    The value is held strongly while it holds no tensor (it dies with the storage then), weakly once it
    does (else the table would keep the storage alive).
    """

    __slots__ = ("key", "strong", "weak")
    key: int
    strong: Value | None
    weak: weakref.ref[Value] | None

    def value(self) -> Value | None:
        """The value, unless it was held by handles and recipes that are all gone."""
        if self.strong is not None:
            return self.strong
        return self.weak() if self.weak is not None else None

    def put(self, value: Value) -> None:
        """This storage has this value now."""
        if value.tensor is None:
            self.strong, self.weak = value, None
        else:
            self.strong, self.weak = None, weakref.ref(value)


class StorageTable(dict[int, StorageEntry]):
    """The live storages that the recorder knows, by identity; a row goes when its storage does (Rule 3)."""

    def __init__(self) -> None:
        super().__init__()
        pop = self.pop
        self._gone = lambda entry: pop(entry.key, None)

    def add(self, key: int, storage: torch.UntypedStorage, value: Value) -> None:
        """A storage that is not in the table has this value, which holds no tensor."""
        entry = StorageEntry(storage, self._gone)
        entry.key = key
        entry.strong = value
        entry.weak = None
        self[key] = entry

    def put(self, storage: torch.UntypedStorage, value: Value) -> None:
        """`storage` has this value from now on."""
        key = storage_key(storage)
        if key not in self:
            self.add(key, storage, value)
        self[key].put(value)

    def put_source(self, tensor: Tensor, storage: torch.UntypedStorage) -> Value:
        """What `tensor` contains now is a value from outside: held from now on, never made again."""
        value = Value(None, storage.nbytes(), None)
        value.hold(tensor, storage)
        self.put(storage, value)
        return value


def version_if_counted(tensor: Tensor) -> int:
    """The version of a tensor; inference tensors count none, and cannot be written where it would matter."""
    try:
        return version_of(tensor)
    except RuntimeError:
        if not tensor.is_inference():
            raise
        return UNWATCHED


def describe(tensor: Tensor) -> str:
    """A tensor for error messages: 'a float32 tensor of shape (3, 4)'."""
    return f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
