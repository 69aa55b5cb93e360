"""Keeping watch in backward: a budget holds there too, after its scope has ended.

While values are in memory that a budget may evict, backward passes through what its scope recorded run under a
mode that makes room for each op, and for those that are replayed. Other passes are left alone. The wrapper around
backward goes when the last value does.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from .effects import FACTS, OpFacts, facts_of
from .modes import EngineMode
from .part_gradients import copied
from .room import POOL, Room
from .torch_private import (
    innermost_mode,
    makes_graph,
    never_compile,
    next_node_number,
    node_number,
    running_node,
    step_aside,
    wrap_backward,
)

# Gradient formulas that take another path while any mode is active, which may differ in the last bit.
_SENSITIVE = re.compile(
    r"(Prod|Cumprod|Logcumsumexp|Max(?!Pool)|Min(?!Pool)|Amax|Amin|Median|Nanmedian|Mode|Kthvalue|Norm|Linalg|Cholesky|Lu|Svd|Qr|Eig|Det|"
    r"Logdet|Slogdet|Inverse|Solve|Triangular|Householder|Orgqr|Ormqr|Ctc|Cdist|Renorm|Trace|Polygamma|"
    r"\w*BackwardBackward)\w*Backward\d*$"
)


class MakesRoom(Protocol):
    """What a watch tells of every op."""

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op."""

    def passes(self) -> None:
        """A view goes by."""

    def clear(self, nbytes: int, what: str, strictly: bool = True) -> None:
        """Make room."""


def yield_to_formula(room: MakesRoom, asked: Tensor) -> None:
    """Called when a node has what it asked for: leave its formula alone if a mode would change what it computes."""
    if is_sensitive(running_node()):
        room.clear(2 * asked.nbytes, "a gradient formula", strictly=False)  # what it makes will not be seen
        step_aside()


@functools.cache
def is_sensitive(node: str) -> bool:
    """Whether this node's formula may compute other bits under a mode."""
    return _SENSITIVE.match(node) is not None


class Watch(EngineMode):  # type: ignore[no-untyped-call]
    """Makes room for every op of a backward pass."""

    watches_backward = True

    def __init__(self, room: MakesRoom) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = FACTS.get(id(func)) or facts_of(func)
        if facts.views:
            self.room.passes()
            return facts.call(*args, **(kwargs or {}))
        return self.room.run(facts, args, kwargs or {})


never_compile(Watch.__torch_dispatch__)


class Span:
    """The backward nodes that were made while a scope was open, by their numbers."""

    def __init__(self, room: Room | None, slept: bool = False) -> None:
        self.room = room
        self.slept = slept  # some of what its nodes will need was saved unseen
        self.thread = threading.get_ident()
        self.first = next_node_number()
        self.end: int | None = None  # None: the scope is open

    def has(self, number: int) -> bool:
        """Whether the node with this number was made in the scope."""
        return self.first <= number and (self.end is None or number < self.end)


_spans: list[Span] = []
_undo: list[Callable[[], None]] = []


def begin(room: Room, *, slept: bool = False) -> None:
    """Watch the backward passes through what this thread records from now on.

    `slept`: nodes of this step may have been made unseen before, which then ask us for nothing.
    """
    _spans.append(Span(room, slept))
    if not _undo:
        _undo.append(wrap_backward(_watched))


def end(room: Room) -> None:
    """The scope has ended; its values may still be there."""
    for span in _spans:
        if span.room is room:
            span.end = next_node_number()
    end_if_done()


def end_if_done() -> None:
    """Stop watching if there is nothing left to evict."""
    if _undo and POOL.is_empty() and all(span.end is not None for span in _spans):
        _undo.pop()()
        _spans.clear()


def spans_reached(roots: Iterable[Tensor], spans: list[Span]) -> set[Span]:
    """The spans through whose nodes a backward pass from these roots goes.

    Nodes are numbered as they are made and lead to older ones only, so that the search ends where a node is
    older than all that was recorded; and inside a span nothing more is to be learnt but of older spans.
    """
    here = threading.get_ident()
    sought = [span for span in spans if span.thread == here]
    reached: set[Span] = set()
    seen: set[int] = set()
    pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    while pending and len(reached) < len(sought):
        node = pending.pop()
        number = node_number(node)
        oldest = min(span.first for span in sought if span not in reached)
        if number < oldest or number in seen or not node.next_functions:  # older, met before, or a leaf
            continue
        seen.add(number)
        reached.update(span for span in sought if span.has(number))
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return reached


def room_of(roots: Iterable[Tensor]) -> Room | None:
    """The room through whose values a backward pass from these roots goes, the latest if there are several."""
    reached = spans_reached(roots, _spans)
    return next((span.room for span in reversed(_spans) if span in reached), None)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(innermost_mode(), "watches_backward", False):
            return original(roots, *args, **kwargs)  # the scope is open, and its recorder watches
        room = room_of(roots)
        if room is None:
            return original(roots, *args, **kwargs)
        unasked = any(span.slept for span in _spans)
        if makes_graph((roots, *args)):
            # The nodes that this pass makes ask us for nothing, so we could not step aside for their formulas.
            _spans.clear()
        hooks = [node.register_prehook(_step_aside) for node in _sensitive_nodes(roots)] if unasked else []
        oldest = min((span.first for span in _spans), default=None)
        try:
            with Watch(room), copied(roots, oldest, room.copies):
                return original(roots, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
            end_if_done()

    return run


def _sensitive_nodes(roots: Iterable[Tensor]) -> list[Any]:
    """The nodes of a backward pass from these roots whose formulas a mode would change."""
    seen: set[Any] = set()
    pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(following for following, _ in node.next_functions if following is not None)
    return [node for node in seen if is_sensitive(node.name())]


def _step_aside(gradients: Any) -> None:
    step_aside()
