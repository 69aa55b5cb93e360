"""`Checkpointer`: a list of layers run forward with few activations stored, and backward with the rest recomputed.

The rule says which layer outputs are stored; the input always is. Backward goes from stored activation to
stored activation: what lies between two of them is recomputed once, used, and released layer by layer, so at
most one segment is alive beside the store. Layers must give the same output for the same input; randomness
is theirs to reproduce. Parameter gradients are the business of the function that reverses a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from .._errors import ArgumentError, BudgetError, MissingCheckpointError, ReplayMismatchError
from ..policies import Decision, EveryN, KeepAll, OpInfo, Policy, as_policy
from ._arrays import copy, describe, detach, flatten, nbytes
from ._exception_notes import add_note
from .store import ActivationStore

Layers: TypeAlias = Sequence[Any] | Mapping[str, Any]
ForwardFn: TypeAlias = Callable[[Any, Any], Any]
BackwardFn: TypeAlias = Callable[[Any, Any, Any], Any]
Costs: TypeAlias = Sequence[float] | Callable[[Any], float]

INPUT = "input"
"""The key of the chain's input in the store; the output of layer i has the key i."""


@dataclass(frozen=True, slots=True)
class CheckpointerStats:
    """What the last forward stored, and what was run since."""

    layers: int
    stored: tuple[int, ...]
    """The layers whose outputs are resident now."""
    forward_calls: int
    """Layers run by `forward`."""
    recomputed_calls: int
    """Layers run again by `recompute` and `backward`."""
    bytes_stored: int
    bytes_avoided: int
    """Bytes of layer outputs that the rule (or the budget) did not store in the last forward, plus what a
    narrower precision avoids for those it did."""
    peak_bytes: int
    """The most activations held at one time, in the store and in the segment being reversed."""


class Checkpointer:
    """Forward with checkpoints by `rule`, backward with recomputation.

    `rule` is any policy of `lowtide.policies`, or a callable from `OpInfo` to `Decision`: `KeepAll()`,
    `KeepNone()`, `EveryN(n)`, `Selective(threshold)`, `Segments(ranges)`. Costs are those in `costs` (one
    number a layer, or a function of the layer), else the microseconds each layer took. With `enabled = False`
    everything is stored and nothing recomputed, whatever the rule.

    `layers` is a sequence, or a mapping whose keys name the layers; `forward_fn(layer, x)` runs one, by
    default `layer(x)`; `backward_fn(layer, x, grad)` returns the gradient for its input x. Torch tensors are
    detached between layers. A store serves one checkpointer at a time.
    """

    def __init__(
        self,
        rule: Policy | Callable[[OpInfo], Decision] | None = None,
        store: ActivationStore | None = None,
        *,
        costs: Costs | None = None,
        enabled: bool = True,
    ) -> None:
        self.rule = EveryN(4) if rule is None else as_policy(rule)
        self.store = ActivationStore() if store is None else store
        self.costs = costs
        self.enabled = enabled
        self._mine: list[Hashable] = []
        # Of the input and of every output, as the last forward saw them.
        self._shapes: list[str] | None = None
        self._output: Any = None  # the shapes of the last output's arrays
        self._forward_calls = self._recomputed_calls = 0
        self._skipped_bytes = self._peak_bytes = 0

    def forward(self, x: Any, layers: Layers, forward_fn: ForwardFn | None = None) -> Any:
        """Run the layers on `x`, store what the rule keeps, and return the last output."""
        named, run = _named(layers), forward_fn or _call
        if self.costs is not None and not callable(self.costs) and len(self.costs) != len(named):
            raise ArgumentError(f"costs has {len(self.costs)} numbers for {len(named)} layers")
        self.clear()
        try:
            return self._forward(x, named, run, self.rule if self.enabled else KeepAll())
        except BaseException:
            self.clear()
            raise

    def _forward(self, x: Any, named: list[tuple[str, Any]], run: ForwardFn, rule: Policy) -> Any:
        self.store.put(INPUT, x, pinned=True)
        self._mine.append(INPUT)
        shapes = [describe(x)]
        since_us = 0.0
        for i, (name, layer) in enumerate(named):
            started = time.perf_counter()
            x = detach(_run(run, name, i, layer, x))
            own_us = (time.perf_counter() - started) * 1e6
            self._forward_calls += 1
            if self.costs is not None:
                own_us = float(self.costs(layer) if callable(self.costs) else self.costs[i])
            size = nbytes(x)
            op = OpInfo(index=i, name=name, layer=i, output_bytes=size, cost_us=own_us, func=layer)
            own_us = rule.own_cost_us(op, own_us)
            since_us += own_us
            op = op._replace(cost_us=own_us, recompute_us=since_us)
            keep = rule.decide(op) is Decision.KEEP or (i + 1 < len(named) and rule.keeps_input_of(i + 1))
            if keep and self._put(i, x, since_us):
                since_us = 0.0
            else:
                self._skipped_bytes += size
            shapes.append(describe(x))
            self._peak_bytes = max(self._peak_bytes, self.store.bytes_stored)
        self._shapes, self._output = shapes, _shapes_of(x)
        return x

    def _put(self, i: int, x: Any, cost: float) -> bool:
        try:
            self.store.put(i, x, cost)
        except BudgetError:
            if self.store.evict == "error":
                raise
            return False  # it can be recomputed, like an evicted value
        self._mine.append(i)
        return True

    def recompute(self, layer: int | str, layers: Layers, forward_fn: ForwardFn | None = None) -> Any:
        """The output of `layer`: the stored one, or recomputed from the nearest stored one before it."""
        named, run = self._known(layers), forward_fn or _call
        index = _index(layer, named)
        start = self._nearest(index + 1)
        x = self.store.get(_key(start))
        for i in range(start, index + 1):
            x = self._again(run, i, named, x)
        return x

    def backward(
        self,
        grad: Any,
        layers: Layers,
        forward_fn: ForwardFn | None,
        backward_fn: BackwardFn,
        *,
        retain: bool = False,
    ) -> Any:
        """The gradient for the input of the chain, given `grad` for its output.

        Stored activations are released as they are passed, unless `retain` keeps them for another backward.
        """
        named, run = self._known(layers), forward_fn or _call
        _check_gradient(grad, self._output, f"the output of the chain is {self._known_shapes()[-1]}")
        stop = len(named)
        if not retain and stop - 1 in self.store:
            self.store.remove(stop - 1)  # no layer has the last output as its input
        while stop > 0:
            start = self._nearest(stop - 1)
            live = [self.store.get(_key(start)) if retain else self.store.take(_key(start))]
            live_bytes = nbytes(live[0])
            x = copy(live[0]) if stop - start > 1 else None
            for i in range(start, stop - 1):
                # Copies: a layer may write into its input, or into a buffer that it gave out.
                x = self._again(run, i, named, x)
                live.append(copy(x))
                live_bytes += nbytes(x)
            del x
            self._peak_bytes = max(self._peak_bytes, self.store.bytes_stored + live_bytes)
            for i in range(stop - 1, start - 1, -1):
                name, layer = named[i]
                x = live.pop()
                shapes, seen = _shapes_of(x), describe(x)
                try:
                    grad = backward_fn(layer, x, grad)
                except Exception as error:
                    add_note(error, f"in the backward of layer {i} ({name})")
                    raise
                del x
                _check_gradient(grad, shapes, f"the input of layer {i} ({name}) is {seen}")
            stop = start
        return grad

    def clear(self) -> None:
        """Forget the last forward and what it stored."""
        for key in self._resident():
            self.store.remove(key)
        self._mine.clear()
        self._shapes = self._output = None
        self._forward_calls = self._recomputed_calls = 0
        self._skipped_bytes = self._peak_bytes = 0

    def stats(self) -> CheckpointerStats:
        """What the last forward stored, and what was run since."""
        return CheckpointerStats(
            layers=len(self._shapes) - 1 if self._shapes else 0,
            stored=tuple(key for key in self._resident() if isinstance(key, int)),
            forward_calls=self._forward_calls,
            recomputed_calls=self._recomputed_calls,
            bytes_stored=self.store.bytes_stored,
            bytes_avoided=self._skipped_bytes + self.store.bytes_avoided,
            peak_bytes=self._peak_bytes,
        )

    def _resident(self) -> list[Hashable]:
        """What this checkpointer put into the store and is still there."""
        return [key for key in self._mine if key in self.store]

    def _known_shapes(self) -> list[str]:
        if self._shapes is None:
            raise MissingCheckpointError("nothing is stored yet: run forward(x, layers, forward_fn) first")
        return self._shapes

    def _known(self, layers: Layers) -> list[tuple[str, Any]]:
        named = _named(layers)
        ran = len(self._known_shapes()) - 1
        if len(named) != ran:
            raise ArgumentError(f"forward ran {ran} layers, but {len(named)} were given now: pass the same ones")
        return named

    def _nearest(self, boundary: int) -> int:
        """The last boundary at or before this one that is stored. Boundary i is the input of layer i."""
        for i in range(boundary, -1, -1):
            if _key(i) in self.store:
                return i
        raise MissingCheckpointError(
            f"the input of layer {boundary} is not stored, nor is anything before it, not even the chain's "
            "input: backward releases activations as it passes them, so run forward again, or pass retain=True"
        )

    def _again(self, run: ForwardFn, i: int, named: list[tuple[str, Any]], x: Any) -> Any:
        name, layer = named[i]
        x = detach(_run(run, name, i, layer, x))
        self._recomputed_calls += 1
        first, now = self._known_shapes()[i + 1], describe(x)
        if first != now:
            raise ReplayMismatchError(
                f"layer {i} ({name}) gave {first} in forward and {now} when it was run again: "
                "a layer must give the same output for the same input"
            )
        return x


def _call(layer: Any, x: Any) -> Any:
    return layer(x)


def _run(run: ForwardFn, name: str, i: int, layer: Any, x: Any) -> Any:
    try:
        return run(layer, x)
    except Exception as error:
        add_note(error, f"in the forward of layer {i} ({name})")
        raise


def _key(boundary: int) -> Hashable:
    return INPUT if boundary == 0 else boundary - 1


def _named(layers: Layers) -> list[tuple[str, Any]]:
    if isinstance(layers, Mapping):
        named = [(str(name), layer) for name, layer in layers.items()]
    else:
        named = [(getattr(layer, "__name__", None) or type(layer).__name__, layer) for layer in layers]
    if not named:
        raise ArgumentError("there are no layers to run")
    return named


def _index(layer: int | str, named: list[tuple[str, Any]]) -> int:
    if isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < len(named):
        return layer
    names = [name for name, _ in named]
    if isinstance(layer, str) and names.count(layer) == 1:
        return names.index(layer)
    raise ArgumentError(
        f"there is no layer {layer!r}: the layers are 0 to {len(named) - 1} ({', '.join(names[:8])}"
        f"{', …' if len(names) > 8 else ''})"
    )


def _shapes_of(value: Any) -> list[tuple[int, ...]]:
    return [tuple(array.shape) for array in flatten(value)[0]]


def _check_gradient(grad: Any, shapes: list[tuple[int, ...]], what: str) -> None:
    """A gradient has the shapes of the value it belongs to; None stands for no gradient."""
    if grad is None:
        return
    got = _shapes_of(grad)
    if got and got != shapes:
        raise ArgumentError(f"{what}, but the gradient given for it is {describe(grad)}")
