"""`Checkpointer`: run a list of layers forward with few stored activations, and backward with recomputation.

The rule selects the layer outputs to store; the input is always stored. Backward recomputes one segment at a
time, from one stored activation to the next, and releases it layer by layer. At most one segment is live
beside the store. Layers must return the same output for the same input, so random layers must fix their
seed. The backward function of a layer computes its parameter gradients.
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
"""The store key of the input of the chain. The output of layer i has the key i."""


@dataclass(frozen=True, slots=True)
class CheckpointerStats:
    """Statistics of the last forward and of the recomputation since."""

    layers: int
    stored: tuple[int, ...]
    """The layers whose outputs are resident now."""
    forward_calls: int
    """Layers run by `forward`."""
    recomputed_calls: int
    """Layers run by `recompute` and `backward`."""
    bytes_stored: int
    bytes_avoided: int
    """Bytes of layer outputs that the last forward did not store, plus the bytes that narrow precision saves on
    the stored ones."""
    peak_bytes: int
    """Peak bytes of activations in the store and in the current segment of backward."""


class Checkpointer:
    """Forward with checkpoints by `rule`, backward with recomputation.

    `rule` is a policy of `lowtide.policies`, such as `EveryN(n)` or `Selective(threshold)`, or a callable from
    `OpInfo` to `Decision`. `costs` is one number per layer, or a function of the layer; the default is the
    measured microseconds of each layer. With `enabled = False`, every output is stored and no layer is
    recomputed.

    `layers` is a sequence, or a mapping from names to layers. `forward_fn(layer, x)` runs one layer, by default
    `layer(x)`. `backward_fn(layer, x, grad)` returns the gradient of the layer's input x. Torch tensors are
    detached between layers. Use a store for one checkpointer at a time.
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
        self._keys: list[Hashable] = []
        self._descriptions: list[str] | None = None  # dtypes and shapes of the input and of every output
        self._output_shapes: Any = None
        self._forward_calls = self._recomputed_calls = 0
        self._skipped_bytes = self._peak_bytes = 0

    def forward(self, x: Any, layers: Layers, forward_fn: ForwardFn | None = None) -> Any:
        """Run the layers on `x`, store the outputs that the rule keeps, and return the last output."""
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
        self._keys.append(INPUT)
        descriptions = [describe(x)]
        recompute_us = 0.0
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
            recompute_us += own_us
            op = op._replace(cost_us=own_us, recompute_us=recompute_us)
            keep = rule.decide(op) is Decision.KEEP or (i + 1 < len(named) and rule.keeps_input_of(i + 1))
            if keep and self._put(i, x, recompute_us):
                recompute_us = 0.0
            else:
                self._skipped_bytes += size
            descriptions.append(describe(x))
            self._peak_bytes = max(self._peak_bytes, self.store.bytes_stored)
        self._descriptions, self._output_shapes = descriptions, _shapes_of(x)
        return x

    def _put(self, i: int, x: Any, cost: float) -> bool:
        try:
            self.store.put(i, x, cost)
        except BudgetError:
            if self.store.evict == "error":
                raise
            return False  # backward recomputes this output, like an evicted one
        self._keys.append(i)
        return True

    def recompute(self, layer: int | str, layers: Layers, forward_fn: ForwardFn | None = None) -> Any:
        """Return the output of `layer`, recomputed from the nearest stored activation before it if necessary."""
        named, run = self._same_layers(layers), forward_fn or _call
        index = _index(layer, named)
        start = self._nearest_stored(index + 1)
        x = self.store.get(_key(start))
        for i in range(start, index + 1):
            x = self._recompute_layer(run, i, named, x)
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
        """Return the gradient of the chain's input, given the gradient `grad` of its output.

        Each stored activation is released after its segment, unless `retain` keeps it for another backward.
        """
        named, run = self._same_layers(layers), forward_fn or _call
        _check_gradient(grad, self._output_shapes, f"the output of the chain is {self._forward_descriptions()[-1]}")
        stop = len(named)
        if not retain and stop - 1 in self.store:
            self.store.remove(stop - 1)  # the last output is the input of no layer
        while stop > 0:
            start = self._nearest_stored(stop - 1)
            live = [self.store.get(_key(start)) if retain else self.store.take(_key(start))]
            live_bytes = nbytes(live[0])
            x = copy(live[0]) if stop - start > 1 else None
            for i in range(start, stop - 1):
                # Copy: a layer may write into its input, or reuse its output buffer.
                x = self._recompute_layer(run, i, named, x)
                live.append(copy(x))
                live_bytes += nbytes(x)
            del x
            self._peak_bytes = max(self._peak_bytes, self.store.bytes_stored + live_bytes)
            for i in range(stop - 1, start - 1, -1):
                name, layer = named[i]
                x = live.pop()
                shapes, description = _shapes_of(x), describe(x)
                try:
                    grad = backward_fn(layer, x, grad)
                except Exception as error:
                    add_note(error, f"in the backward of layer {i} ({name})")
                    raise
                del x
                _check_gradient(grad, shapes, f"the input of layer {i} ({name}) is {description}")
            stop = start
        return grad

    def clear(self) -> None:
        """Remove the activations of the last forward and reset the statistics."""
        for key in self._resident_keys():
            self.store.remove(key)
        self._keys.clear()
        self._descriptions = self._output_shapes = None
        self._forward_calls = self._recomputed_calls = 0
        self._skipped_bytes = self._peak_bytes = 0

    def stats(self) -> CheckpointerStats:
        """Return the statistics of the last forward and of the recomputation since."""
        return CheckpointerStats(
            layers=len(self._descriptions) - 1 if self._descriptions else 0,
            stored=tuple(key for key in self._resident_keys() if isinstance(key, int)),
            forward_calls=self._forward_calls,
            recomputed_calls=self._recomputed_calls,
            bytes_stored=self.store.bytes_stored,
            bytes_avoided=self._skipped_bytes + self.store.bytes_avoided,
            peak_bytes=self._peak_bytes,
        )

    def _resident_keys(self) -> list[Hashable]:
        """Return the keys of this checkpointer that were not evicted or removed."""
        return [key for key in self._keys if key in self.store]

    def _forward_descriptions(self) -> list[str]:
        if self._descriptions is None:
            raise MissingCheckpointError("nothing is stored yet: run forward(x, layers, forward_fn) first")
        return self._descriptions

    def _same_layers(self, layers: Layers) -> list[tuple[str, Any]]:
        """Return the named layers. Raise `ArgumentError` if forward ran a different number of layers."""
        named = _named(layers)
        forward_count = len(self._forward_descriptions()) - 1
        if len(named) != forward_count:
            raise ArgumentError(f"forward ran {forward_count} layers, but {len(named)} were passed: pass the same ones")
        return named

    def _nearest_stored(self, boundary: int) -> int:
        """Return the last stored boundary up to this one. Boundary i is the input of layer i."""
        for i in range(boundary, -1, -1):
            if _key(i) in self.store:
                return i
        raise MissingCheckpointError(
            f"neither the input of layer {boundary} nor an earlier activation is stored: backward releases "
            "activations after use. Run forward again, or pass retain=True to the first backward"
        )

    def _recompute_layer(self, run: ForwardFn, i: int, named: list[tuple[str, Any]], x: Any) -> Any:
        name, layer = named[i]
        x = detach(_run(run, name, i, layer, x))
        self._recomputed_calls += 1
        expected, actual = self._forward_descriptions()[i + 1], describe(x)
        if expected != actual:
            raise ReplayMismatchError(
                f"layer {i} ({name}) returned {expected} in forward and {actual} in recomputation: "
                "a layer must return the same output for the same input"
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


def _check_gradient(grad: Any, shapes: list[tuple[int, ...]], expected: str) -> None:
    """Raise `ArgumentError`, which starts with `expected`, if `grad` has other shapes. None is no gradient."""
    if grad is None:
        return
    grad_shapes = _shapes_of(grad)
    if grad_shapes and grad_shapes != shapes:
        raise ArgumentError(f"{expected}, but its gradient is {describe(grad)}")
