"""The autograd engine: graph tasks, nodes, saved-tensor hooks, backward passes."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from .dispatch import is_tracing_only

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the id of the backward pass that runs in this thread, or -1."""

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Enable or disable grad in this thread. Cheaper than the public name, which creates an object."""


def run_backward(loss: torch.Tensor) -> None:
    """Run a backward pass. If it raises, free its graph.

    Torch leaves the nodes that still wait in a queue of this thread. They hold the graph until the next backward pass.
    """
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except BaseException:
        torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        raise


def innermost_hooks() -> Any:
    """Return the innermost pair of saved-tensor hooks of this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def saved_tensor_hooks_allowed() -> bool:
    """Return whether saved-tensor hooks can be used here. Transforms of torch.func reject them."""
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return enabled and torch._C._functorch.peek_interpreter_stack() is None


def exit_hooks(pack: Any) -> None:
    """Remove the saved-tensor hooks with this `pack`, even if others were added after them."""
    above = []
    while (top := innermost_hooks()) is not None and top[0] != pack:
        above.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    if top is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for other in reversed(above):
        torch._C._autograd._push_saved_tensors_default_hooks(*other)


def without_hooks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, called with no saved-tensor hooks in this thread.

    A collective copies the thread-local state into its work object, which a thread of the backend frees later. If the
    interpreter has ended by then, freeing a hook ends the process with SIGABRT.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        removed = []
        while (hooks := innermost_hooks()) is not None:
            removed.append(hooks)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            return function(*args, **kwargs)
        finally:
            for hooks in reversed(removed):
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

    return call


def running_node() -> str:
    """Return the name of the backward node that runs in this thread, such as "MulBackward0"."""
    node = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the number of the next backward node that is created in this thread."""

node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""Return the number of a backward node. Numbers increase with creation. Leaves have the largest possible number."""


def running_node_number() -> int:
    """Return the number of the backward node that runs in this thread, or -1."""
    node = torch._C._current_autograd_node()
    return node_number(node) if node is not None else -1


def running_node_result_bytes() -> int:
    """Return the bytes of all gradients that the backward node which runs in this thread returns."""
    node = torch._C._current_autograd_node()
    edges: Any = node.next_functions if node is not None else ()
    results = [following._input_metadata[slot] for following, slot in edges if following is not None]
    return sum(math.prod(result.shape) * result.dtype.itemsize for result in results)


def before_next_nodes(call: Callable[[torch.Tensor], Any]) -> None:
    """Call `call` with each gradient that the running backward node returns, before the node that gets it runs."""

    def install(following: Any, slot: int) -> None:
        def run(gradients: tuple[torch.Tensor | None, ...]) -> None:
            hook.remove()
            gradient = gradients[slot]
            if gradient is not None:
                call(gradient)

        hook = following.register_prehook(run)

    node = torch._C._current_autograd_node()
    for following, slot in node.next_functions if node is not None else ():
        if following is not None:
            install(following, slot)


Backward = Callable[..., Any]

# The installed wrappers, and the function that they replace. Module state, because torch has one such function.
_wrappers: list[Callable[[Backward], Backward]] = []
_original_backward: list[Backward] = []


def wrap_backward(wrapper: Callable[[Backward], Backward], *, outermost: bool = False) -> Callable[[], None]:
    """Run every backward pass that Python starts as `wrapper(original)`. Return a function that undoes this.

    `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all call one private function, which is
    replaced while there are wrappers.
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
    """Return whether a backward pass with these arguments (see `wrap_backward`) creates a graph."""
    return len(args) > 3 and bool(args[3])  # tensors, their gradients, retain_graph, create_graph, ...


def retains_graph(args: tuple[Any, ...]) -> bool:
    """Return whether a backward pass with these arguments (see `wrap_backward`) leaves the saved tensors in place."""
    return len(args) > 2 and bool(args[2])


def reinstall_hook(handle: Any, hook: Callable[..., Any]) -> None:
    """Install a hook again that was removed through its handle. The handle stays valid."""
    handle.hooks_dict_ref()[handle.id] = hook
    for flags in handle.extra_dict_ref:  # for example: also call the hook after an error
        flags()[handle.id] = True
