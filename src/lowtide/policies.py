"""Policies: for each op, whether to keep its output or recompute it in backward.

A policy is a frozen dataclass with one method, `decide(op) -> Decision`. Its only input is an `OpInfo`.
Policies hold no tensors and do not import torch, so the same objects work with autograd
(`lowtide.saving`) and with plain step functions (`lowtide.chain`). Combine two policies with `|` (keep
if either keeps) or `&` (keep if both keep). Any callable from `OpInfo` to `Decision` is a policy too.

The costs below are for n ops that produce `a` bytes of activations in L layers.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ._errors import ArgumentError


class Decision(enum.Enum):
    """Decision for a value that autograd saves."""

    KEEP = "keep"
    RECOMPUTE = "recompute"


_KEEP, _RECOMPUTE = Decision.KEEP, Decision.RECOMPUTE  # `decide` runs for every op; enum member lookup is slow


class OpInfo(NamedTuple):
    """Description of one op that has just run, passed to `Policy.decide`."""

    index: int  # type: ignore[assignment]  # shadows tuple.index, which is not used on this record
    """Zero-based index among the ops of this scope that produced a value."""
    name: str
    """Namespace, op and overload, such as `"aten.mm.default"`; in a chain the name of the layer."""
    module: str = ""
    """Dotted path of the innermost running module; empty outside modules."""
    layer: int | None = None
    """Zero-based index of the layer call that contains the op; None outside layers."""
    outside_layers: bool = False
    """True if the model has layers and the op runs in none of them (embedding, head, loss)."""
    output_bytes: int = 0
    cost_us: float = 0.0
    """Time of this op alone. Measured only for policies with `needs_cost`."""
    recompute_us: float = 0.0
    """Time of this op and of all ops that would be replayed before it. Only for policies with `needs_cost`."""
    func: Any = None
    """The op itself: a `torch._ops.OpOverload`, or the layer of a chain."""
    args: tuple[Any, ...] = ()
    """Arguments of the call. Do not store them: a reference keeps the tensors alive."""
    kwargs: Any = None


class Policy:
    """Base class of policies. Subclasses are frozen dataclasses."""

    needs_cost = False
    """True if `decide` reads `cost_us` or `recompute_us`. Ops are timed only then."""
    needs_layers = False
    """True if `decide` reads `layer`, or if `keeps_input_of` can return True."""
    layers: Any = None
    """Layers to use if `needs_layers`; None selects the repeated blocks of the model."""
    constant_decision: Decision | None = None
    """The decision if `decide` returns the same one for every op, else None. Reset to None in subclasses that
    override `decide` without setting it."""
    cacheable: bool = False
    """True if `decide` reads only `name`, `module`, `layer` and `outside_layers`, so that decisions can be cached.
    Reset to False in subclasses that override `decide` without setting it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for attribute in ("constant_decision", "cacheable"):
            definer = next(base for base in cls.__mro__ if attribute in vars(base) or "decide" in vars(base))
            if attribute not in vars(definer):  # the inherited attribute describes an overridden `decide`
                setattr(cls, attribute, getattr(Policy, attribute))

    def decide(self, op: OpInfo) -> Decision:
        """Return whether to keep or recompute the output of `op`."""
        raise NotImplementedError(f"{type(self).__name__} is a policy without a decide method")

    def keeps_input_of(self, layer: int) -> bool:
        """Return whether the inputs of this layer are kept regardless of `decide`."""
        return False

    def own_cost_us(self, op: OpInfo, measured_us: float) -> float:
        """Return the cost of this op alone, given its measured time."""
        return measured_us

    def __or__(self, other: Policy) -> Policy:
        return EitherKeeps(self, as_policy(other))

    def __and__(self, other: Policy) -> Policy:
        return BothKeep(self, as_policy(other))


@dataclass(frozen=True)
class KeepAll(Policy):
    """Keep everything, as plain PyTorch does. Memory O(a), no extra time."""

    constant_decision = Decision.KEEP
    cacheable = True

    def decide(self, op: OpInfo) -> Decision:
        """Return `Decision.KEEP`."""
        return Decision.KEEP


@dataclass(frozen=True)
class KeepNone(Policy):
    """Recompute every value produced in the scope. Tensors from outside the scope are kept.

    Memory between forward and backward is O(1) beyond the scope's inputs. Extra time is at most one forward,
    O(n). The first unpack replays all ops that it depends on, so the peak in backward is still O(a): apply
    `KeepNone` to parts of a model (as `checkpoint` does), or use `EveryN`.
    """

    constant_decision = Decision.RECOMPUTE
    cacheable = True

    def decide(self, op: OpInfo) -> Decision:
        """Return `Decision.RECOMPUTE`."""
        return Decision.RECOMPUTE


@dataclass(frozen=True)
class EveryN(Policy):
    """Keep the input of every n-th layer and recompute the rest of the layers. Outside the layers keep everything.

    Memory is O(a/L · (L/n + n)), smallest at n = √L. Extra time is at most one forward of the layers. `layers`
    is a list of modules, a module class, or dotted names with `*`; None selects the repeated blocks of the model.
    """

    n: int
    layers: Any = None
    needs_layers = True
    cacheable = True

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise ArgumentError(f"EveryN(n) keeps the input of every n-th layer: n must be an int ≥ 1, not {self.n!r}")

    def decide(self, op: OpInfo) -> Decision:
        """Return RECOMPUTE inside the layers, KEEP outside."""
        return Decision.KEEP if op.layer is None else Decision.RECOMPUTE

    def keeps_input_of(self, layer: int) -> bool:
        """Return whether n divides `layer`."""
        return layer % self.n == 0


@dataclass(frozen=True)
class Selective(Policy):
    """Keep values whose recompute cost is at least `min_cost_us`; recompute cheaper ones.

    The cost of a value includes all ops that would be replayed before its own. A long chain of cheap ops (a
    residual stream) is therefore interrupted by kept values. Op costs are measured the first times that ops of
    one signature run, and then fixed; or `cost(op)` returns them in microseconds. Extra time is below
    `min_cost_us` for each saved value. Memory is O(a) for models of large ops and falls as the threshold rises.
    """

    min_cost_us: float = 100.0
    cost: Callable[[OpInfo], float] | None = None
    needs_cost = True

    def __post_init__(self) -> None:
        if not self.min_cost_us >= 0:
            raise ArgumentError(f"Selective(min_cost_us) must be ≥ 0 microseconds, not {self.min_cost_us!r}")

    def decide(self, op: OpInfo) -> Decision:
        """Return KEEP if the recompute cost reaches the threshold."""
        return _KEEP if op.recompute_us >= self.min_cost_us else _RECOMPUTE

    def own_cost_us(self, op: OpInfo, measured_us: float) -> float:
        """Return `cost(op)` if given, else the measured time."""
        return measured_us if self.cost is None else float(self.cost(op))


@dataclass(frozen=True)
class Segments(Policy):
    """Recompute the ops in these ranges of op indices, both ends included; keep the rest.

    Memory is O(a − bytes produced in the ranges + the largest range). Extra time is one more run of the ranges.
    """

    ranges: tuple[tuple[int, int], ...]
    _starts: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _last: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    """`_last[n]` is the largest index in the first n ranges."""

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        checked = []
        for item in ranges:
            pair = tuple(item)
            if len(pair) != 2 or not all(isinstance(i, int) for i in pair) or not 0 <= pair[0] <= pair[1]:
                raise ArgumentError(
                    f"Segments takes (start, end) pairs of op indices, end included and 0 ≤ start ≤ end, not {item!r}"
                )
            checked.append((pair[0], pair[1]))
        object.__setattr__(self, "ranges", tuple(sorted(checked)))
        ends = accumulate((end for _, end in self.ranges), max)  # ranges may overlap
        object.__setattr__(self, "_starts", [start for start, _ in self.ranges])
        object.__setattr__(self, "_last", [float("-inf"), *ends])

    @classmethod
    def uniform(cls, num_ops: int, num_segments: int) -> Segments:
        """Return `num_segments` equal ranges over `num_ops` ops; the last one includes the remainder.

        There are no ranges if either number is 0 or if there are more segments than ops.
        """
        if num_ops < 0 or num_segments < 0:
            raise ArgumentError(
                f"Segments.uniform counts ops and segments: neither may be negative (got {num_ops}, {num_segments})"
            )
        if num_ops == 0 or num_segments == 0 or num_segments > num_ops:
            return cls()
        length = num_ops // num_segments
        starts = range(0, length * num_segments, length)
        return cls((s, num_ops - 1 if k == num_segments - 1 else s + length - 1) for k, s in enumerate(starts))

    def recomputes(self, index: int) -> bool:
        """Return whether the op with this index is in one of the ranges."""
        return index <= self._last[bisect_right(self._starts, index)]

    def mask(self, num_ops: int) -> list[bool]:
        """Return for each of `num_ops` ops whether it is recomputed."""
        return [self.recomputes(i) for i in range(num_ops)]

    def decide(self, op: OpInfo) -> Decision:
        """Return RECOMPUTE inside the ranges."""
        return _RECOMPUTE if self.recomputes(op.index) else _KEEP


@dataclass(frozen=True)
class SaveOps(Policy):
    """Keep the outputs of these ops and the inputs of the layers; recompute the rest of the layers.

    `ops` are overloads, packets or names: `"mm"`, `"aten.mm"`, `"aten.mm.default"` and
    `torch.ops.aten.mm` all mean matrix products. Outside the layers everything is kept. In a scope
    without layers the policy applies to all ops. Memory is O(bytes produced by the ops + L layer inputs + one
    layer). Extra time is one more run of the other ops.
    """

    ops: tuple[Any, ...]
    layers: Any = None
    needs_layers = True
    cacheable = True
    _names: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)

    def __init__(self, ops: Iterable[Any] | str, layers: Any = None) -> None:
        # An OpOverloadPacket is iterable too: iteration gives the names of its overloads.
        is_single = isinstance(ops, str) or hasattr(ops, "_qualified_op_name") or not isinstance(ops, Iterable)
        listed = (ops,) if is_single else tuple(ops)
        object.__setattr__(self, "ops", listed)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "_names", frozenset(_op_name(op) for op in listed))

    def decide(self, op: OpInfo) -> Decision:
        """Return KEEP for the listed ops and for ops outside the layers."""
        if op.outside_layers:
            return Decision.KEEP
        parts = op.name.split(".")
        spellings = (op.name, ".".join(parts[:2]), parts[1] if len(parts) > 1 else op.name)
        return Decision.RECOMPUTE if self._names.isdisjoint(spellings) else Decision.KEEP

    def keeps_input_of(self, layer: int) -> bool:
        """Return True: every layer input is kept."""
        return True


def _op_name(op: Any) -> str:
    """Return the dotted name of `"mm"`, `"aten::mm"`, `torch.ops.aten.mm` or `torch.ops.aten.mm.default`."""
    if not isinstance(op, str):
        packet = getattr(op, "_qualified_op_name", None)  # only an OpOverloadPacket has this attribute
        op = packet if isinstance(packet, str) else str(op)
    return str(op).replace("::", ".")


@dataclass(frozen=True)
class ByCallable(Policy):
    """Policy that calls a plain function from `OpInfo` to `Decision`."""

    function: Callable[[OpInfo], Decision]

    def decide(self, op: OpInfo) -> Decision:
        """Return the decision of the function; raise `ArgumentError` if its result is not a `Decision`."""
        decision = self.function(op)
        if decision is not _KEEP and decision is not _RECOMPUTE:
            raise wrong_decision(self, decision, op.name)
        return decision


def wrong_decision(policy: Policy, decision: object, op: str) -> ArgumentError:
    """Return the error for a result of `decide` that is not a `Decision`."""
    source = policy.function if isinstance(policy, ByCallable) else policy
    return ArgumentError(
        f"the policy {source!r} returned {decision!r} for {op}: "
        "return lowtide.Decision.KEEP or lowtide.Decision.RECOMPUTE"
    )


@dataclass(frozen=True)
class _Pair(Policy):
    first: Policy
    second: Policy

    @property
    def needs_cost(self) -> bool:  # type: ignore[override]
        """True if either policy needs costs."""
        return self.first.needs_cost or self.second.needs_cost

    @property
    def needs_layers(self) -> bool:  # type: ignore[override]
        """True if either policy needs layers."""
        return self.first.needs_layers or self.second.needs_layers

    @property
    def cacheable(self) -> bool:  # type: ignore[override]
        """True if both policies are cacheable."""
        return self.first.cacheable and self.second.cacheable

    @property
    def layers(self) -> Any:
        """Layers of the first policy that names some."""
        return self.first.layers if self.first.layers is not None else self.second.layers

    def own_cost_us(self, op: OpInfo, measured_us: float) -> float:
        """Return the cost according to the first policy that needs costs."""
        return (self.first if self.first.needs_cost else self.second).own_cost_us(op, measured_us)


@dataclass(frozen=True)
class EitherKeeps(_Pair):
    """`a | b`: keep a value if either policy keeps it."""

    cacheable = _Pair.cacheable

    def decide(self, op: OpInfo) -> Decision:
        """Return KEEP if either policy does."""
        kept = Decision.KEEP in (self.first.decide(op), self.second.decide(op))
        return Decision.KEEP if kept else Decision.RECOMPUTE

    def keeps_input_of(self, layer: int) -> bool:
        """Return whether either policy keeps the inputs of this layer."""
        return self.first.keeps_input_of(layer) or self.second.keeps_input_of(layer)


@dataclass(frozen=True)
class BothKeep(_Pair):
    """`a & b`: keep a value if both policies keep it."""

    cacheable = _Pair.cacheable

    def decide(self, op: OpInfo) -> Decision:
        """Return RECOMPUTE if either policy does."""
        recomputed = Decision.RECOMPUTE in (self.first.decide(op), self.second.decide(op))
        return Decision.RECOMPUTE if recomputed else Decision.KEEP

    def keeps_input_of(self, layer: int) -> bool:
        """Return whether both policies keep the inputs of this layer."""
        return self.first.keeps_input_of(layer) and self.second.keeps_input_of(layer)


def as_policy(policy: Policy | Callable[[OpInfo], Decision]) -> Policy:
    """Return `policy` itself, or a callable wrapped as a policy."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, type):
        raise ArgumentError(f"pass an instance, {policy.__name__}(...), not the class")
    if callable(policy):
        return ByCallable(policy)
    raise ArgumentError(
        f"{policy!r} is not a policy: pass KeepAll(), KeepNone(), EveryN(n), Selective(), SaveOps(ops), "
        "Segments(ranges), or a callable from lowtide.OpInfo to lowtide.Decision"
    )
