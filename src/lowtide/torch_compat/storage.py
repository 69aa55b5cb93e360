"""Storages and aliases of tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from .dispatch import _ADINPLACE, _is_excluded, _set_excluded, below_autograd, without_modes

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Return the address of the C++ storage, which identifies the storage while it is alive."""

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Return the number of in-place writes to the tensor and to aliases that share its version counter."""


def watched_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias without a graph that shares the version counter of `tensor`.

    Below autograd, `detach()` would start a new counter and hide later writes (Rule 11). The tensor itself would hold
    its graph, which may hold a handle (Rule 4).
    """
    if tensor.is_leaf:
        return tensor  # it has no graph
    if not _is_excluded(_ADINPLACE):
        return watched_alias_above_kernels(tensor)
    _set_excluded(_ADINPLACE, False)  # takes half the time of a guard
    try:
        return watched_alias_above_kernels(tensor)
    finally:
        _set_excluded(_ADINPLACE, True)


def watched_alias_above_kernels(tensor: torch.Tensor) -> torch.Tensor:
    """Like `watched_alias`, in a third of the time. Must not be called inside an op; a pack hook may call it."""
    if tensor.is_leaf:
        return tensor
    if type(tensor) is not torch.Tensor:
        return tensor.detach()  # a wrapper subclass implements its own detach
    return new_alias(tensor)


new_alias: Callable[[torch.Tensor], torch.Tensor] = functools.partial(torch.Tensor._make_subclass, torch.Tensor)
"""Return another tensor over the same memory, without a graph. Dispatch modes are not called."""

_storage_users: Callable[[int], int] = torch._C._storage_Use_Count

_tensor_users: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")


def is_unshared(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor shares the storage and no C++ code holds the tensor."""
    # The Python object of the storage counts as one user.
    return _storage_users(storage_key(tensor.untyped_storage())) == 2 and _tensor_users(tensor) == 1


def has_content(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a tensor, if it has one, holds all that the tensor is.

    False for nested tensors, whose sizes are not in the storage, and for tensors without memory: meta tensors, and the
    zero tensors that forward-mode AD uses for missing tangents.
    """
    if tensor.is_nested or tensor.is_meta:
        return False
    # Only Python asks a zero tensor for its address without a crash.
    return not tensor._is_zerotensor()


_SPARSE_PARTS: dict[torch.layout, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    torch.sparse_coo: (torch.Tensor._indices, torch.Tensor._values),
    torch.sparse_csr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_csc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
    torch.sparse_bsr: (torch.Tensor.crow_indices, torch.Tensor.col_indices, torch.Tensor.values),
    torch.sparse_bsc: (torch.Tensor.ccol_indices, torch.Tensor.row_indices, torch.Tensor.values),
}


def kind_of(tensor: torch.Tensor) -> str:
    """Return a word for a tensor that is not the content of one storage: "nested", "sparse_coo", "meta", "zero"."""
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.").lstrip("_")
    if tensor.is_meta:
        return "meta"
    return "zero" if tensor._is_zerotensor() else "functorch"


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a dense tensor, or of the memory of any other one."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        return tensor.numel() * tensor.itemsize
    return sum(storage.nbytes() for storage in memory_of(tensor))


def shape_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape of a tensor; for a nested tensor, the shapes of its components or of its dense values."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    if tensor.layout is torch.strided:
        return tuple(map(tuple, tensor._nested_tensor_size().tolist()))
    values: torch.Tensor = tensor._values  # type: ignore[assignment]
    return tensor.dim(), *values.shape


def memory_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages that hold the memory of a tensor of any kind.

    A sparse tensor and a wrapper subclass have several. Meta tensors, zero tensors and uninitialised parameters have
    none.
    """
    if is_wrapper(type(tensor)):
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
        return [storage for name in names for storage in memory_of(getattr(tensor, name))]
    parts = _SPARSE_PARTS.get(tensor.layout)
    if parts is not None:
        with without_modes(), below_autograd():
            return [part(tensor).untyped_storage() for part in parts]
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()  # raises for zero tensors
    except (NotImplementedError, RuntimeError, ValueError):
        return []
    return [] if storage.device.type == "meta" else [storage]


def is_wrapper(cls: type) -> bool:
    """Return whether `cls` is a wrapper subclass, whose tensors have no storage (Rule 14)."""
    return getattr(cls, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a lazily negated view of `tensor`."""
    view: torch.Tensor = torch._neg_view(tensor)
    return view
