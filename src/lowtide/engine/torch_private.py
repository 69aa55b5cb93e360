"""Every private name of torch that the engine depends on, one small function each.

They move between releases; `tests/engine/test_torch_private.py` says which one broke.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""What identifies a storage while it lives: the address of its C++ object."""

version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often the tensor, or any alias that shares its counter, has been written in place."""

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward pass that this thread is inside of, or -1."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Whether autograd records, in this thread from now on: a setting, without the object that its public name makes."""

is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
only_warns_if_not_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms_warn_only
matmul_precision: Callable[[], str] = torch._C._get_float32_matmul_precision
"""Settings of torch, each a Python frame less than by its public name: every replay asks for them."""

_ADINPLACE = torch._C.DispatchKey.ADInplaceOrView
_is_excluded, _set_excluded = (
    torch._C._dispatch_tls_is_dispatch_key_excluded,
    torch._C._dispatch_tls_set_dispatch_key_excluded,
)
_ABOVE_KERNELS = torch._C._dispatch_keyset_full() - torch._C._dispatch_keyset_full_after(_ADINPLACE)


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


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares this one's storage, and nothing in C++ holds this tensor."""
    # Its storage's count has one more for the storage's own Python object.
    return _storage_users(storage_key(tensor.untyped_storage())) == 2 and _tensor_users(tensor) == 1


def below_autograd() -> AbstractContextManager[Any]:
    """Run ops at the level at which they were recorded: no autograd, no autocast, no functorch."""
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS)
    return guard


def innermost_mode() -> Any:
    """The dispatch mode that sees ops first in this thread now, or None."""
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def leave_mode(mode: Any) -> None:
    """End a dispatch mode, also one that others have been entered above since."""
    above = []
    while (top := innermost_mode()) is not None and top is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    mode.__exit__(None, None, None)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)


def lay_down_mode(mode: Any) -> int | None:
    """Take a dispatch mode off the stack if it is the innermost: the depth at which it was, else None."""
    depth = torch._C._len_torch_dispatch_stack()
    if not depth or torch._C._get_dispatch_stack_at(depth - 1) is not mode:
        return None
    torch._C._pop_torch_dispatch_stack(None)
    return depth - 1


def take_up_mode(mode: Any, depth: int) -> None:
    """Put a dispatch mode back at this depth, under what others have put above it since."""
    above = []
    while torch._C._len_torch_dispatch_stack() > depth:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    for one in (mode, *reversed(above)):
        torch._C._push_on_torch_dispatch_stack(one)


class _Farewell:
    """Calls something when it goes."""

    __slots__ = ("_say",)

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say

    def __del__(self) -> None:
        self._say()


def once_returned(kwargs: dict[str, Any], action: Callable[[], None]) -> None:
    """Have `action` called when the op that a dispatch mode is being handed has returned and the mode is back in place.

    While a mode is handed an op it is not on the stack, and afterwards it is put back whatever it did: it cannot be
    laid down meanwhile. But the keywords that it is handed are a dict made for this call, which goes right after that.
    Should a release keep it for longer, `action` comes later: it has to look whether it is still wanted.
    """
    kwargs["returned"] = _Farewell(action)


def saving_hooks() -> Any:
    """The innermost pair of saved-tensor hooks of this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def saving_hooks_allowed() -> bool:
    """Whether saved-tensor hooks can be used here: transforms of torch.func refuse them."""
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return enabled and torch._C._functorch.peek_interpreter_stack() is None


def leave_hooks(pack: Any) -> None:
    """End the saved-tensor hooks with this `pack`, also where others have been entered above since."""
    above = []
    while (top := saving_hooks()) is not None and top[0] != pack:
        above.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if top is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for other in reversed(above):
        torch._C._autograd._push_saved_tensors_default_hooks(*other)


def lay_down_hooks(pack: Any) -> tuple[Any, Any] | None:
    """Take the saved-tensor hooks with this `pack` off if they are the innermost: they, and what is under them."""
    top = saving_hooks()
    if top is None or top[0] != pack:
        return None
    torch._C._autograd._pop_saved_tensors_default_hooks()
    return top, saving_hooks()


def take_up_hooks(hooks: Any, below: Any) -> bool:
    """Put hooks back right above `below`; whether they are allowed here."""
    if not saving_hooks_allowed():
        return False
    above = []
    while (top := saving_hooks()) is not None and top != below:
        above.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for one in (hooks, *reversed(above)):
        torch._C._autograd._push_saved_tensors_default_hooks(*one)
    return True


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of this module run compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def step_aside() -> None:
    """Take the innermost mode off this thread's stack until the backward node that is running now has ended.

    Some gradient formulas (of `prod`, for one) take another path while any dispatch mode is active, and
    differ in the last bit. Autograd sets the stack anew for every node, so nothing has to be put back.
    """
    torch._C._pop_torch_dispatch_stack(None)


def running_node() -> str:
    """The name of the backward node that is running now in this thread: "MulBackward0"."""
    node = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next backward node made in this thread will have."""

node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The number of a backward node. They count up as nodes are made; leaves have the largest there is."""


def running_node_number() -> int:
    """The number of the backward node that is running now; -1 outside of any."""
    node = torch._C._current_autograd_node()
    return node_number(node) if node is not None else -1


Backward = Callable[..., Any]
_wrappers: list[Callable[[Backward], Backward]] = []
_original_backward: list[Backward] = []


def wrap_backward(wrapper: Callable[[Backward], Backward], *, outermost: bool = False) -> Callable[[], None]:
    """Have every backward pass that Python starts run through `wrapper(original)`; call the result to undo it.

    `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all go through one function, which is
    replaced while there is any wrapper.
    """
    home: Any = torch.autograd
    if not _wrappers:
        _original_backward[:] = [home._engine_run_backward]
        home._engine_run_backward = _run_backward
    _wrappers.insert(len(_wrappers) if outermost else 0, wrapper)

    def undo() -> None:
        if wrapper in _wrappers:
            _wrappers.remove(wrapper)
            if not _wrappers and home._engine_run_backward is _run_backward:
                home._engine_run_backward = _original_backward[0]

    return undo


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    run = _original_backward[0]
    if not only_traced():
        for wrapper in _wrappers:
            run = wrapper(run)
    return run(*args, **kwargs)


def only_traced() -> bool:
    """Whether ops are traced here and nothing is computed, as when `torch.compile` makes a backward graph."""
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY, keys.FUNCTIONAL))


def makes_graph(args: tuple[Any, ...]) -> bool:
    """Whether the backward pass with these arguments (see `wrap_backward`) is itself to be differentiated."""
    return len(args) > 3 and bool(args[3])  # tensors, their gradients, retain_graph, create_graph, ...


def without_modes() -> AbstractContextManager[Any]:
    """Run ops that no dispatch mode sees, the recorder included."""
    guard: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
    return guard


def never_compile(function: Any) -> None:
    """Keep dynamo from tracing this function, and what it calls, when it runs beneath compiled code.

    What `torch.compiler.disable` does, without a wrapper around every call.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))


def kernel_of(func: Any) -> Callable[..., Any]:
    """What calling an op calls; a Python frame less, where it is called for every op of a model."""
    kernel: Callable[..., Any] = getattr(func, "_op", func)  # higher-order ops have none
    if not _loses_count(func):
        return kernel

    @functools.wraps(kernel)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with torch._C._SetExcludeDispatchKeyGuard(_ADINPLACE, False):
            return kernel(*args, **kwargs)

    return counted


def _loses_count(func: Any) -> bool:
    """Whether what this op writes would not count as written (`_version`) when it is called from a dispatch mode.

    Most ops that write count it in a layer above modes. `_foreach_add_` and others that write lists leave it to the
    ops that they consist of, for which a mode switches that layer off. Autograd, which goes by the count, would then
    take a view that such an op has written for what it was before: a wrong gradient, without an error.
    """
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "ADInplaceOrView")


def put_back_hook(handle: Any, hook: Callable[..., Any]) -> None:
    """Install a hook again that its handle has removed, under the number that it had."""
    handle.hooks_dict_ref()[handle.id] = hook
    for flags in handle.extra_dict_ref:  # such as "call it also after an error"
        flags()[handle.id] = True


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class dispatch themselves and have no storage of their own (Rule 14)."""
    return getattr(kind, "__torch_dispatch__", None) is not torch._C._disabled_torch_dispatch_impl


def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the op's schema says it writes."""
    return tuple(
        (i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def returns_only_views(func: Any) -> bool:
    """Whether the schema says that every result is an alias that the op did not write."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
