"""Dispatch keys and modes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

_ADINPLACE = torch._C.DispatchKey.ADInplaceOrView

_is_excluded, _set_excluded = (
    torch._C._dispatch_tls_is_dispatch_key_excluded,
    torch._C._dispatch_tls_set_dispatch_key_excluded,
)

_ABOVE_KERNELS = torch._C._dispatch_keyset_full() - torch._C._dispatch_keyset_full_after(_ADINPLACE)


def below_autograd() -> AbstractContextManager[Any]:
    """Run ops at the level at which they were recorded: no autograd, no autocast, no functorch."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)
    return guard


def innermost_mode() -> Any:
    """The dispatch mode that sees ops first in this thread now, or None."""
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def exit_mode(mode: Any) -> None:
    """End a dispatch mode, also one that others have been entered above since."""
    above = []
    while (top := innermost_mode()) is not None and top is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    mode.__exit__(None, None, None)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)


def suspend_innermost_mode() -> None:
    """Take the innermost mode off this thread's stack until the backward node that is running now has ended.

    Some gradient formulas (of `prod`, for one) take another path while any dispatch mode is active, and
    differ in the last bit. Autograd sets the stack anew for every node, so nothing has to be put back.
    """
    torch._C._pop_torch_dispatch_stack(None)


def is_tracing_only() -> bool:
    """Whether ops are traced here and nothing is computed, as when `torch.compile` makes a backward graph."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


def without_modes() -> AbstractContextManager[Any]:
    """Run ops that no dispatch mode sees, the recorder included."""
    guard: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
    return guard


def kernel_of(func: Any) -> Callable[..., Any]:
    """What calling an op calls; a Python frame less, where it is called for every op of a model."""
    kernel: Callable[..., Any] = getattr(func, "_op", func)  # higher-order ops have none
    if not _skips_version_bump(func):
        return kernel

    @functools.wraps(kernel)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with torch._C._SetExcludeDispatchKeyGuard(_ADINPLACE, False):
            return kernel(*args, **kwargs)

    return counted


def _skips_version_bump(func: Any) -> bool:
    """Whether what this op writes would not count as written (`_version`) when it is called from a dispatch mode.

    Most ops that write count it in a layer above modes. `_foreach_add_` and others that write lists leave it to the
    ops that they consist of, for which a mode switches that layer off. Autograd, which goes by the count, would then
    take a view that such an op has written for what it was before: a wrong gradient, without an error.
    """
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "ADInplaceOrView")
