"""Storages and aliases of tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch

from .dispatch import _ADINPLACE, _is_excluded, _set_excluded

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


def is_wrapper(cls: type) -> bool:
    """Return whether `cls` is a wrapper subclass, whose tensors have no storage (Rule 14)."""
    return getattr(cls, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def negated_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a lazily negated view of `tensor`."""
    view: torch.Tensor = torch._neg_view(tensor)
    return view
