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
    """Run ops below autograd, autocast and functorch, the level at which they are recorded."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)
    return guard


def innermost_mode() -> Any:
    """Return the innermost dispatch mode of this thread, or None."""
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def exit_mode(mode: Any) -> None:
    """Exit a dispatch mode, even if others were entered after it."""
    above = []
    while (top := innermost_mode()) is not None and top is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    mode.__exit__(None, None, None)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)


def suspend_innermost_mode() -> None:
    """Remove the innermost mode of this thread until the running backward node ends.

    Some gradient formulas (for example of `prod`) use other kernels while a dispatch mode is active, and their results
    differ in the last bit. Autograd sets the stack for every node, so the mode need not be restored.
    """
    torch._C._pop_torch_dispatch_stack(None)


def is_tracing_only() -> bool:
    """Return whether ops are only traced, as when `torch.compile` builds a backward graph."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


def without_modes() -> AbstractContextManager[Any]:
    """Disable all dispatch modes, including the recorder."""
    guard: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
    return guard


def kernel_of(func: Any) -> Callable[..., Any]:
    """Return the function that `func(...)` calls internally. Calling it directly saves a Python frame.

    Called from a dispatch mode, it computes the same bits as without one.
    """
    kernel: Callable[..., Any] = getattr(func, "_op", func)  # higher-order ops have no `_op`
    if _depends_on_state(func):
        return _in_state_of_call(kernel)
    if not _skips_version_bump(func):
        return kernel

    @functools.wraps(kernel)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with torch._C._SetExcludeDispatchKeyGuard(_ADINPLACE, False):
            return kernel(*args, **kwargs)

    return counted


# Ops besides those of linalg whose kernels conjugate lazily, or call ops that autocast casts. Torch's own samples have
# shown them (`tests/engine/test_torch_ops.py`).
_STATE_INSIDE = {"aten::dot", "aten::vdot", "aten::isinf", "aten::std", "aten::std_mean", "aten::var", "aten::var_mean",
                 "aten::_trilinear"}  # fmt: skip
_KEYS = torch._C.DispatchKey
_LAZY_VIEWS = (_KEYS.Conjugate, _KEYS.Negative, _KEYS.ZeroTensor)
_AUTOCAST = [getattr(_KEYS, name) for name in ("AutocastCPU", "AutocastCUDA", "AutocastXPU") if hasattr(_KEYS, name)]


def is_autocast_inside() -> bool:
    """Return whether autocast applies inside the kernel of the op that a dispatch mode has received."""
    return bool(_autocast_keys())


def _autocast_keys() -> list[Any]:
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # the state of the call
        return [key for key in _AUTOCAST if not _is_excluded(key)]


def _in_state_of_call(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel whose inner ops do the same with and without a dispatch mode.

    A mode excludes the keys above it, so that inner ops would not conjugate lazily conjugated tensors, and would not be
    autocast. The mode restores the keys when it returns.
    """

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_excluded(_KEYS.Conjugate):  # called from a mode
            for key in (*_LAZY_VIEWS, *_autocast_keys()):
                _set_excluded(key, False)
        return kernel(*args, **kwargs)

    return run


def _depends_on_state(func: Any) -> bool:
    """Return whether the kernel of an op calls other ops that depend on keys above modes."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._schema.name
    return "linalg_" in name or name in _STATE_INSIDE


def _skips_version_bump(func: Any) -> bool:
    """Return whether this op does not increase `_version` of the tensors it writes when called from a dispatch mode.

    Most ops increase the version in a dispatch layer above modes. `_foreach_add_` and other ops that write lists leave
    it to their inner ops, for which a mode disables that layer. Autograd would not notice the write, and a view of the
    tensor would get a wrong gradient without an error.
    """
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "ADInplaceOrView")
