"""Gradients that wait as a part of a larger one are copied, so that the larger one can go.

What `torch.cat` joined, its backward takes apart again: into views of one gradient. One of them is used at once; that
of a skip connection waits until backward comes to where the skip began, and with it waits the memory of all. In a U-Net
that is as much again as the skips' own gradients, for most of backward. A copy of the part has the same bits, and
costs next to nothing.

Nobody sees that it was a copy (Rule 1). It is made only where the part waits to be added to another gradient, which
closes the gaps in memory anyway, and only if its strides leave one way to close them: formulas may sum in another order
where memory lies otherwise. If nothing comes to be added after all, it gets its gaps back before the node's formula
runs (though a hook on that tensor, which autograd calls first, has been given it without).
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ...torch_compat import node_number, version_of

_JOINS = "CatBackward0"
_LONG = 8
"""Nodes that run while a gradient waits, from which on that is long."""
_LEAST_BYTES = 2**16
_LEAST_SAVED = 0.25
"""Of the copy's own bytes: what has to go for it to be worth it."""
_LEAF = 2**63  # leaves have the largest number there is: they wait for nothing

Tensor = torch.Tensor
Told = Callable[[Tensor], Callable[[float], None]]
"""Called with a part that is about to be copied; what it returns is called with the seconds that it took, when the
copy's wait is over."""


@contextlib.contextmanager
def copied(roots: Iterable[Tensor], oldest: int | None, told: Told | None = None) -> Iterator[None]:
    """While a backward pass from these roots runs: copy such gradients.

    Of nodes with the number `oldest` or a later one; None: of none.
    """
    joins = _joins(roots, oldest) if oldest is not None else []
    hooks = [hook for join in joins for hook in join.install(told)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Copy(NamedTuple):
    """A part that waits."""

    storage: weakref.ref[torch.UntypedStorage]
    version: int
    stride: tuple[int, ...]
    """Where its elements were,"""
    offset: int
    """from where on."""
    took_s: float
    is_over: Callable[[float], None] | None

    def is_still(self, arrived: Tensor) -> bool:
        """Whether this is what arrived, and nothing has been added to it."""
        return arrived.untyped_storage() is self.storage() and version_of(arrived) == self.version


class _Join:
    """A node that takes a gradient apart, and the parts that wait."""

    def __init__(self, node: Any, waiting: list[int]) -> None:
        self._node = node
        self._waiting = waiting  # positions
        self._copies: dict[int, _Copy] = {}

    def install(self, told: Told | None) -> list[Any]:
        """The hooks that copy the parts, and look at them once more when their wait is over."""

        def take_apart(parts: tuple[Tensor | None, ...], whole: Any) -> tuple[Tensor | None, ...]:
            return tuple(
                self._copy(i, part, told) if i in self._waiting and part is not None else part
                for i, part in enumerate(parts)
            )

        hooks = [self._node.register_hook(take_apart)]
        for i in self._waiting:
            consumer, slot = self._node.next_functions[i]
            hooks.append(consumer.register_prehook(self._end_of_wait(i, slot)))
        return hooks

    def _copy(self, position: int, part: Tensor, told: Told | None) -> Tensor:
        if type(part) is not Tensor or part.layout is not torch.strided or part.requires_grad or not _is_ordered(part):
            return part
        saved_bytes = part.untyped_storage().nbytes() - part.nbytes
        if part.nbytes < _LEAST_BYTES or saved_bytes < _LEAST_SAVED * part.nbytes:
            return part
        is_over = told(part) if told is not None else None
        began = time.perf_counter()
        copy = part.clone()
        took_s = time.perf_counter() - began
        self._copies[position] = _Copy(
            # Of the tensor itself a reference would keep its memory from being added to.
            weakref.ref(copy.untyped_storage()),
            version_of(copy),
            part.stride(),
            int(part.storage_offset()),
            took_s,
            is_over,
        )
        return copy

    def _end_of_wait(self, position: int, slot: int) -> Callable[[tuple[Tensor | None, ...]], Any]:
        def look(gradients: tuple[Tensor | None, ...]) -> Any:
            copy = self._copies.pop(position, None)
            if copy is None:
                return None
            if copy.is_over is not None:
                copy.is_over(copy.took_s)
            arrived = gradients[slot]
            if arrived is None or not copy.is_still(arrived):
                return None  # another gradient was added
            return (*gradients[:slot], _with_gaps(arrived, copy.stride, copy.offset), *gradients[slot + 1 :])

        return look


def _is_ordered(part: Tensor) -> bool:
    """Whether closing the gaps in memory leaves no choice: no two dimensions could change places."""
    strides = part.stride()
    return min(part.shape, default=0) > 1 and min(strides) > 0 and len(set(strides)) == len(strides)


def _with_gaps(tensor: Tensor, stride: tuple[int, ...], offset: int) -> Tensor:
    """The same elements where they were as a part."""
    last = offset + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True))
    memory = torch.empty(last + 1, dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, stride, offset).copy_(tensor)


def _joins(roots: Iterable[Tensor], oldest: int) -> list[_Join]:
    """The nodes of a backward pass some of whose gradients wait for long, to be added to others."""
    found: list[Any] = []
    seen: set[Any] = set()
    readers: Counter[tuple[Any, int]] = Counter()
    pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node in seen or node_number(node) < oldest:
            continue
        seen.add(node)
        if node.name() == _JOINS:
            found.append(node)
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        readers.update(edges)
        pending += [following for following, _ in edges]
    joins = []
    for node in found:
        numbers = [-1 if f is None else node_number(f) for f, _ in node.next_functions]
        next_to_run = max((number for number in numbers if number < _LEAF), default=-1)
        waiting = [
            i
            for i, (number, edge) in enumerate(zip(numbers, node.next_functions, strict=True))
            if edge[0] is not None and next_to_run - number > _LONG and readers[edge] > 1
        ]
        if waiting:
            joins.append(_Join(node, waiting))
    return joins
