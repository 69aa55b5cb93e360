"""Keeping watch in backward: a budget holds there too, after its scope has ended.

While values are in memory that a budget may evict, backward passes run under a mode that makes room for each op,
and for those that are replayed. A pass that asks for no value of a budget is never stopped by one. The wrapper
around backward goes when the last value does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .effects import FACTS, facts_of
from .room import POOL, Room
from .torch_private import innermost_mode, makes_graph, never_compile, running_node, step_aside, wrap_backward

# Gradient formulas that take another path while any mode is active, which may differ in the last bit.
_SENSITIVE = re.compile(
    r"(Prod|Cumprod|Logcumsumexp|Max(?!Pool)|Min(?!Pool)|Amax|Amin|Median|Nanmedian|Mode|Kthvalue|Norm|Linalg|Cholesky|Lu|Svd|Qr|Eig|Det|"
    r"Logdet|Slogdet|Inverse|Solve|Triangular|Householder|Orgqr|Ormqr|Ctc|Cdist|Renorm|Trace|Polygamma|"
    r"\w*BackwardBackward)\w*Backward\d*$"
)


def yield_to_formula(room: Room, asked: Tensor) -> None:
    """Called when a node has what it asked for: leave its formula alone if a mode would change what it computes."""
    if is_sensitive(running_node()):
        room.clear(2 * asked.nbytes, "a gradient formula", strictly=False)  # what it makes will not be seen
        step_aside()


@functools.cache
def is_sensitive(node: str) -> bool:
    """Whether this node's formula may compute other bits under a mode."""
    return _SENSITIVE.match(node) is not None


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes room for every op of a backward pass."""

    watches_backward = True
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, room: Room) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self.is_ours = False  # until the pass asks for a value of a budget, it may have nothing to do with one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = FACTS.get(id(func)) or facts_of(func)
        if facts.views:
            return facts.call(*args, **(kwargs or {}))
        return self.room.run(facts, args, kwargs or {}, strictly=self.is_ours)

    def serves(self, room: Room) -> None:
        """The pass has asked for a value of this room."""
        self.room = room
        self.is_ours = True


never_compile(Watch.__torch_dispatch__)


_undo: list[Callable[[], None]] = []
_latest: list[Room] = []


def begin(room: Room) -> None:
    """Watch backward passes from now on."""
    _latest[:] = [room]
    if not _undo:
        _undo.append(wrap_backward(_watched))


def end_if_done() -> None:
    """Stop watching if there is nothing left to evict."""
    if _undo and POOL.is_empty():
        _undo.pop()()
        _latest.clear()


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _latest or getattr(innermost_mode(), "watches_backward", False):
            return original(*args, **kwargs)  # the scope is open, and its recorder watches; or this pass is inside one
        room = _latest[0]
        if makes_graph(args):
            # The nodes that this pass makes ask us for nothing, so we could not step aside for their formulas.
            _latest.clear()
        try:
            with Watch(room):
                return original(*args, **kwargs)
        finally:
            end_if_done()

    return run
