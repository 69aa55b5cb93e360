"""The autograd engine: graph tasks, nodes, saved-tensor hooks, backward passes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from .dispatch import is_tracing_only

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward pass that this thread is inside of, or -1."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Whether autograd records, in this thread from now on: a setting, without the object that its public name makes."""


def innermost_hooks() -> Any:
    """The innermost pair of saved-tensor hooks of this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def saved_tensor_hooks_allowed() -> bool:
    """Whether saved-tensor hooks can be used here: transforms of torch.func refuse them."""
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return enabled and torch._C._functorch.peek_interpreter_stack() is None


def exit_hooks(pack: Any) -> None:
    """End the saved-tensor hooks with this `pack`, also where others have been entered above since."""
    above = []
    while (top := innermost_hooks()) is not None and top[0] != pack:
        above.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if top is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for other in reversed(above):
        torch._C._autograd._push_saved_tensors_default_hooks(*other)


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
    if not is_tracing_only():
        for wrapper in _wrappers:
            run = wrapper(run)
    return run(*args, **kwargs)


def creates_graph(args: tuple[Any, ...]) -> bool:
    """Whether the backward pass with these arguments (see `wrap_backward`) is itself to be differentiated."""
    return len(args) > 3 and bool(args[3])  # tensors, their gradients, retain_graph, create_graph, ...


def reinstall_hook(handle: Any, hook: Callable[..., Any]) -> None:
    """Install a hook again that its handle has removed, under the number that it had."""
    handle.hooks_dict_ref()[handle.id] = hook
    for flags in handle.extra_dict_ref:  # such as "call it also after an error"
        flags()[handle.id] = True
