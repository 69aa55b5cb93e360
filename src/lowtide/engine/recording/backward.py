"""Backward passes under a memory budget, also after the scope of the budget has ended.

While evictable values are in memory, backward passes through the recorded graph run under a mode that evicts values
before each op. Other backward passes are not touched. The wrapper around backward is removed with the last value.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from ...torch_compat import (
    EngineMode,
    before_next_nodes,
    creates_graph,
    in_dual_level,
    innermost_mode,
    nbytes_of,
    never_compile,
    new_alias,
    next_node_number,
    node_number,
    running_node,
    running_node_result_bytes,
    suspend_innermost_mode,
    wrap_backward,
)
from ..memory.budget import MemoryBudget
from ..memory.eviction import Pool
from ..ops.facts import FACTS, OpFacts, facts_of
from .gradient_copies import copy_gradients

# Gradient formulas that take another path while any mode is active, and may then differ in the last bit. The node of an
# in-place op on a view may have any formula. `masked_fill` with a number (MaskedFillBackward0) always takes the same.
_MODE_SENSITIVE = re.compile(
    r"(\w+::)*CopySlices$|"
    r"(Prod|Cumprod|Logcumsumexp|Max(?!Pool)|Min(?!Pool)|Amax|Amin|Median|Nanmedian|Mode|Kthvalue|Norm|Linalg|Cholesky|Lu|"
    r"Svd|Qr|Eig|Det|Logdet|Slogdet|Inverse|Solve|Triangular|Householder|Orgqr|Ormqr|Ctc|Cdist|Renorm|Trace|Polygamma|"
    r"MaskedFill(?=Backward1)|\w*BackwardBackward)\w*Backward\d*$"
)


_FORMULA_COPIES = 4
"""Memory that such a formula needs, in copies of its results or of the unpacked tensor. Of 30 formulas, 28 need at
most 4.3, and `renorm` and `logcumsumexp` 8. Doubled: more is evicted before them."""


class BackwardObserver(Protocol):
    """Runs the ops of a backward pass: a memory budget, or a meter of the peak."""

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op."""

    def view_ran(self) -> None:
        """Called for a view op, which allocates nothing."""

    def count(self, tensor: Tensor) -> None:
        """Called with a gradient that a formula returned, before the next node uses it."""

    def formula_begins(self, nbytes: int, held: Tensor | None) -> None:
        """Called before a gradient formula whose ops are not observed. It needs about `nbytes`.

        Only autograd holds the tensor `held`. It frees it when the formula returns, or, if it has made another tensor
        object of it for the formula, when the formula begins.
        """


class BackwardMode(EngineMode):  # type: ignore[no-untyped-call]
    """The mode under which a watched backward pass runs."""

    watches_backward = True

    def __init__(self, observer: BackwardObserver) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = FACTS.get(id(func)) or facts_of(func)
        if facts.views:
            self.observer.view_ran()
            return facts.call(*args, **(kwargs or {}))
        return self.observer.run(facts, args, kwargs or {})


never_compile(BackwardMode.__torch_dispatch__)


def suspend_for_formula(observer: BackwardObserver, unpacked: Tensor) -> Tensor:
    """Suspend the mode after an unpack, if it would change the bits of the running gradient formula.

    Return the tensor for the formula.
    """
    if not is_mode_sensitive(running_node()):
        return unpacked
    held = None
    if type(unpacked) is Tensor and not unpacked.requires_grad:
        held = unpacked = new_alias(unpacked)
    before_next_nodes(observer.count)
    observer.formula_begins(_FORMULA_COPIES * max(nbytes_of(unpacked), running_node_result_bytes()), held)
    suspend_innermost_mode()
    return unpacked


@functools.cache  # a fact about gradient formulas
def is_mode_sensitive(node: str) -> bool:
    """Return whether the formula of this node may compute other bits under a mode."""
    return _MODE_SENSITIVE.match(node) is not None


class NodeSpan:
    """The autograd nodes that one thread created while a scope was open, by their sequence numbers."""

    def __init__(self, memory_budget: MemoryBudget | None) -> None:
        self.memory_budget = memory_budget
        self.thread = threading.get_ident()
        self.first = next_node_number()
        self.end: int | None = None  # None: the scope is open

    def has(self, number: int) -> bool:
        """Return whether the node with this number was created in the scope."""
        return self.first <= number and (self.end is None or number < self.end)


def spans_reached(roots: Iterable[Tensor], spans: list[NodeSpan]) -> set[NodeSpan]:
    """Return the spans that a backward pass from these roots passes through.

    Nodes are numbered in the order of their creation, and edges lead to older nodes only. So the search stops at nodes
    that are older than all spans that were not reached yet.
    """
    here = threading.get_ident()
    sought = [span for span in spans if span.thread == here]
    reached: set[NodeSpan] = set()
    seen: set[int] = set()
    pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    while pending and len(reached) < len(sought):
        node = pending.pop()
        number = node_number(node)
        oldest = min(span.first for span in sought if span not in reached)
        if number < oldest or number in seen or not node.next_functions:  # older, visited, or a leaf
            continue
        seen.add(number)
        reached.update(span for span in sought if span.has(number))
        pending.extend(following for following, _ in node.next_functions if following is not None)
    return reached


class BackwardWatcher:
    """Runs backward passes within the memory budgets of the scopes that they pass through."""

    def __init__(self) -> None:
        self._spans: list[NodeSpan] = []
        self._pools: set[Pool] = set()
        self._unwrap: Callable[[], None] | None = None

    def begin(self, memory_budget: MemoryBudget) -> None:
        """Watch backward passes through the nodes that this thread creates from now on."""
        self._spans.append(NodeSpan(memory_budget))
        self._pools.add(memory_budget.pool)
        if self._unwrap is None:
            self._unwrap = wrap_backward(self._watched)

    def end(self, memory_budget: MemoryBudget) -> None:
        """End the span of a scope. Its values may still be in memory."""
        for span in self._spans:
            if span.memory_budget is memory_budget:
                span.end = next_node_number()
        self.end_if_done()

    def end_if_done(self) -> None:
        """Stop watching if all scopes have ended and no evictable value is in memory."""
        if self._unwrap is None or any(span.end is None for span in self._spans):
            return
        if all(pool.is_empty() for pool in self._pools):
            self._unwrap()
            self._unwrap = None
            self._spans.clear()
            self._pools.clear()

    @property
    def is_watching(self) -> bool:
        """Whether backward is wrapped now."""
        return self._unwrap is not None

    def _budget_of(self, roots: Iterable[Tensor]) -> MemoryBudget | None:
        """Return the latest memory budget whose nodes a backward pass from these roots passes through."""
        reached = spans_reached(roots, self._spans)
        return next((span.memory_budget for span in reversed(self._spans) if span in reached), None)

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(innermost_mode(), "watches_backward", False):
                return original(roots, *args, **kwargs)  # the scope is open, and its recorder watches
            if in_dual_level():  # the formulas for tangents compute other bits under a mode
                return original(roots, *args, **kwargs)
            memory_budget = self._budget_of(roots)
            if memory_budget is None:
                return original(roots, *args, **kwargs)
            if creates_graph((roots, *args)):
                # The nodes that this pass creates unpack no handle, so the mode could not be suspended for them.
                self._spans.clear()
            oldest = min((span.first for span in self._spans), default=None)
            try:
                with BackwardMode(memory_budget), copy_gradients(roots, oldest, memory_budget.gradient_copied):
                    return original(roots, *args, **kwargs)
            finally:
                memory_budget.formula_ended()
                self.end_if_done()

        return run
