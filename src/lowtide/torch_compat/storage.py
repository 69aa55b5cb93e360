"""Storages and aliases of tensors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch

from .dispatch import _ADINPLACE, _is_excluded, _set_excluded

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""What identifies a storage while it lives: the address of its C++ object."""

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often the tensor, or any alias that shares its counter, has been written in place."""


def watched_alias(tensor: torch.Tensor) -> torch.Tensor:
    """An alias without history that still shares `tensor`'s version counter.

    Below autograd a plain `detach()` would start a new counter and hide later writes (Rule 11), and the
    tensor itself would hold on to its graph, which may hold us (Rule 4).
    """
    if tensor.is_leaf:
        return tensor  # it has no history
    if not _is_excluded(_ADINPLACE):
        return watched_alias_above_kernels(tensor)
    _set_excluded(_ADINPLACE, False)  # half of the time that a guard takes
    try:
        return watched_alias_above_kernels(tensor)
    finally:
        _set_excluded(_ADINPLACE, True)


def watched_alias_above_kernels(tensor: torch.Tensor) -> torch.Tensor:
    """The same, a third of the time, where it is not called from inside an op (a pack hook is not)."""
    if tensor.is_leaf:
        return tensor
    if type(tensor) is not torch.Tensor:
        return tensor.detach()  # a wrapper has to detach itself
    return new_alias(tensor)


new_alias: Callable[[torch.Tensor], torch.Tensor] = functools.partial(torch.Tensor._make_subclass, torch.Tensor)
"""Another tensor over the same memory, without history: a detach that no dispatch mode sees."""

_storage_users: Callable[[int], int] = torch._C._storage_Use_Count

_tensor_users: Callable[[torch.Tensor], int] = operator.methodcaller("_use_count")


def is_unshared(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares this one's storage, and nothing in C++ holds this tensor."""
    # Its storage's count has one more for the storage's own Python object.
    return _storage_users(storage_key(tensor.untyped_storage())) == 2 and _tensor_users(tensor) == 1


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class dispatch themselves and have no storage of their own (Rule 14)."""
    return getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl
