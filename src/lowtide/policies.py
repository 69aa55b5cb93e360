"""Policies: for each op, whether to keep its output or recompute it in backward.

A rule is a frozen record with one method, `decide(op) -> Decision`, and sees an op only through an
`OpInfo`. Rules hold no tensors and import no torch, so the same objects serve autograd
(`lowtide.saving`) and plain step functions (`lowtide.chain`). Combine them with `|` (keep what either
keeps) and `&` (keep what both keep). Any callable from `OpInfo` to `Decision` is a policy too.

In the costs below, n ops make a bytes of activations over L layers.
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
    """What becomes of a value that backward may ask for."""

    KEEP = "keep"
    RECOMPUTE = "recompute"


_KEEP, _RECOMPUTE = Decision.KEEP, Decision.RECOMPUTE  # an enum looks its members up slowly, and this is asked every op


class OpInfo(NamedTuple):
    """What a policy is told about one op that has just run."""

    index: int  # type: ignore[assignment]  # shadows tuple.index, which is not used on this record
    """How many value-making ops of this scope came before it."""
    name: str
    """Namespace, op and overload, such as `"aten.mm.default"`; for chains the layer's name."""
    module: str = ""
    """Dotted path of the innermost module that ran it; empty outside any module."""
    layer: int | None = None
    """Which of the layers it ran in, counted in order of their calls; None outside all of them."""
    outside_layers: bool = False
    """In a model that has layers, but in none of them (its embedding, head and loss)."""
    output_bytes: int = 0
    cost_us: float = 0.0
    """What this op alone took. Measured only for policies that ask for it (`needs_cost`)."""
    recompute_us: float = 0.0
    """This op and all that would have to be replayed before it. Only for `needs_cost` policies."""
    func: Any = None
    """The op itself (a `torch._ops.OpOverload`, or a chain's layer)."""
    args: tuple[Any, ...] = ()
    """What it was called with. Look, but do not keep: that would hold the tensors."""
    kwargs: Any = None


class Policy:
    """The contract of a rule. Subclasses are frozen dataclasses."""

    needs_cost = False
    """Whether `decide` reads `cost_us` or `recompute_us`, so that ops are timed."""
    needs_layers = False
    """Whether `decide` reads `layer`, or `keeps_input_of` may say yes."""
    layers: Any = None
    """The layers to use, for rules with `needs_layers`; None finds the repeated blocks."""
    always: Decision | None = None
    """The answer, where it is the same for every op. A class with a `decide` of its own has to say it anew."""
    by_place: bool = False
    """Whether `decide` reads nothing but `name`, `module`, `layer` and `outside_layers`, so that an answer may be
    remembered instead of asked for again. A class with a `decide` of its own has to say so itself."""
    steady: bool = False
    """Whether a `needs_cost` rule answers alike whenever a forward has gone the same way: the same ops in the same
    places, of the same sizes and costs. Its answers are remembered then, once the costs are final. A class with a
    `decide` or `own_cost_us` of its own has to say so itself."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for promise, of in (("always", {"decide"}), ("by_place", {"decide"}), ("steady", {"decide", "own_cost_us"})):
            first = next(kind for kind in cls.__mro__ if promise in vars(kind) or not of.isdisjoint(vars(kind)))
            if promise not in vars(first):  # it was promised of another method
                setattr(cls, promise, getattr(Policy, promise))

    def decide(self, op: OpInfo) -> Decision:
        """Keep or recompute what `op` made."""
        raise NotImplementedError(f"{type(self).__name__} is a policy without a decide method")

    def keeps_input_of(self, layer: int) -> bool:
        """Whether the inputs of this layer are kept, whatever `decide` said of them."""
        return False

    def own_cost_us(self, op: OpInfo, measured_us: float) -> float:
        """The cost of this op alone, given what it took when it was measured."""
        return measured_us

    def __or__(self, other: Policy) -> Policy:
        return EitherKeeps(self, as_policy(other))

    def __and__(self, other: Policy) -> Policy:
        return BothKeep(self, as_policy(other))


@dataclass(frozen=True)
class KeepAll(Policy):
    """Keep everything: plain PyTorch. Memory O(a), no extra time."""

    always = Decision.KEEP
    by_place = True

    def decide(self, op: OpInfo) -> Decision:
        """Keep."""
        return Decision.KEEP


@dataclass(frozen=True)
class KeepNone(Policy):
    """Keep nothing inside the scope but what comes from outside it.

    Least memory between forward and backward, O(1) beyond the scope's inputs; at most one extra forward,
    O(n) time. The first ask in backward replays all that it depends on, so inside one scope the peak in
    backward is still O(a): use it on parts (as `checkpoint` does), or use `EveryN`.
    """

    always = Decision.RECOMPUTE
    by_place = True

    def decide(self, op: OpInfo) -> Decision:
        """Recompute."""
        return Decision.RECOMPUTE


@dataclass(frozen=True)
class EveryN(Policy):
    """Keep the input of every n-th layer and recompute all between; outside the layers keep everything.

    Memory O(a/L · (L/n + n)), least at n = √L; at most one extra forward of the layers. `layers` may be
    modules, a module class, or dotted names with `*`; None finds the repeated blocks of the model.
    """

    n: int
    layers: Any = None
    needs_layers = True
    by_place = True

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise ArgumentError(f"EveryN(n) keeps the input of every n-th layer: n must be an int ≥ 1, not {self.n!r}")

    def decide(self, op: OpInfo) -> Decision:
        """Recompute inside the layers, keep outside."""
        return Decision.KEEP if op.layer is None else Decision.RECOMPUTE

    def keeps_input_of(self, layer: int) -> bool:
        """Whether n divides `layer`."""
        return layer % self.n == 0


@dataclass(frozen=True)
class Selective(Policy):
    """Keep a value whose recompute would cost `min_cost_us` or more; recompute cheaper ones.

    The cost is that of the op and of everything that would be replayed before it, so chains of cheap ops
    (a residual stream) are cut when they add up. Op costs are measured when ops of that signature first
    run, and then settled; or given by `cost(op)` in microseconds. Extra time is below min_cost_us for each saved value;
    memory is O(a) for models made of large ops and falls as the threshold rises.
    """

    min_cost_us: float = 100.0
    cost: Callable[[OpInfo], float] | None = None
    needs_cost = True

    def __post_init__(self) -> None:
        if not self.min_cost_us >= 0:
            raise ArgumentError(f"Selective(min_cost_us) must be ≥ 0 microseconds, not {self.min_cost_us!r}")

    @property
    def steady(self) -> bool:  # type: ignore[override]
        """Unless the costs are the user's to give, who may look at anything."""
        return self.cost is None

    def decide(self, op: OpInfo) -> Decision:
        """Keep values with a high recompute cost."""
        return _KEEP if op.recompute_us >= self.min_cost_us else _RECOMPUTE

    def own_cost_us(self, op: OpInfo, measured_us: float) -> float:
        """The user's figure where there is one."""
        return measured_us if self.cost is None else float(self.cost(op))


@dataclass(frozen=True)
class Segments(Policy):
    """Recompute the ops in these inclusive ranges of indices, keep the rest.

    Memory O(a − bytes made in the ranges + the largest range); time, one more run of the ranges.
    """

    ranges: tuple[tuple[int, int], ...]
    _starts: list[int] = field(default_factory=list, init=False, repr=False, compare=False)
    _last: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    """The last index in any of the first n ranges, by n."""

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
        """`num_segments` equal ranges over `num_ops` ops; the last one takes the remainder.

        No ranges when either number is 0 or there are more segments than ops.
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
        """Whether the op with this index is in one of the ranges."""
        return index <= self._last[bisect_right(self._starts, index)]

    def mask(self, num_ops: int) -> list[bool]:
        """For each of `num_ops` ops, whether it is recomputed."""
        return [self.recomputes(i) for i in range(num_ops)]

    def decide(self, op: OpInfo) -> Decision:
        """Recompute inside the ranges."""
        return _RECOMPUTE if self.recomputes(op.index) else _KEEP


@dataclass(frozen=True)
class SaveOps(Policy):
    """Keep what these ops make, and the layers' inputs; recompute the rest of the layers.

    `ops` are overloads, packets or names: `"mm"`, `"aten.mm"`, `"aten.mm.default"` and
    `torch.ops.aten.mm` all mean matrix products. Outside the layers everything is kept; in a scope
    without layers the rule holds everywhere. Memory O(bytes made by the ops + L boundaries + one layer);
    time, the ops not listed once more.
    """

    ops: tuple[Any, ...]
    layers: Any = None
    needs_layers = True
    by_place = True
    _names: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)

    def __init__(self, ops: Iterable[Any] | str, layers: Any = None) -> None:
        one = isinstance(ops, str) or hasattr(ops, "_qualified_op_name") or not isinstance(ops, Iterable)
        listed = (ops,) if one else tuple(ops)  # a packet is iterable too: it gives the names of its overloads
        object.__setattr__(self, "ops", listed)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "_names", frozenset(_op_name(op) for op in listed))

    def decide(self, op: OpInfo) -> Decision:
        """Keep what the listed ops make, and what is made outside the layers."""
        if op.outside_layers:
            return Decision.KEEP
        parts = op.name.split(".")
        spellings = (op.name, ".".join(parts[:2]), parts[1] if len(parts) > 1 else op.name)
        return Decision.RECOMPUTE if self._names.isdisjoint(spellings) else Decision.KEEP

    def keeps_input_of(self, layer: int) -> bool:
        """Every layer's input is a boundary."""
        return True


def _op_name(op: Any) -> str:
    """`"mm"`, `"aten::mm"`, `torch.ops.aten.mm` or `torch.ops.aten.mm.default` as a dotted name."""
    if not isinstance(op, str):
        packet = getattr(op, "_qualified_op_name", None)  # an OpOverloadPacket prints as aten.mm too
        op = packet if isinstance(packet, str) else str(op)
    return str(op).replace("::", ".")


@dataclass(frozen=True)
class ByCallable(Policy):
    """A plain function from `OpInfo` to `Decision`, as a policy."""

    function: Callable[[OpInfo], Decision]

    def decide(self, op: OpInfo) -> Decision:
        """Whatever the function says."""
        decision = self.function(op)
        if decision is not _KEEP and decision is not _RECOMPUTE:
            raise wrong_decision(self, decision, op.name)
        return decision


def wrong_decision(policy: Policy, decision: object, op: str) -> ArgumentError:
    """What to say of an answer that is none."""
    asked = policy.function if isinstance(policy, ByCallable) else policy
    return ArgumentError(
        f"the policy {asked!r} returned {decision!r} for {op}: "
        "return lowtide.Decision.KEEP or lowtide.Decision.RECOMPUTE"
    )


@dataclass(frozen=True)
class _Pair(Policy):
    first: Policy
    second: Policy

    @property
    def needs_cost(self) -> bool:  # type: ignore[override]
        """If either does."""
        return self.first.needs_cost or self.second.needs_cost

    @property
    def needs_layers(self) -> bool:  # type: ignore[override]
        """If either does."""
        return self.first.needs_layers or self.second.needs_layers

    @property
    def by_place(self) -> bool:  # type: ignore[override]
        """If both are."""
        return self.first.by_place and self.second.by_place

    @property
    def steady(self) -> bool:  # type: ignore[override]
        """If both are, or go by place, which is steadier."""
        return all(rule.steady or rule.by_place for rule in (self.first, self.second))

    @property
    def layers(self) -> Any:
        """The first that names any."""
        return self.first.layers if self.first.layers is not None else self.second.layers

    def own_cost_us(self, op: OpInfo, measured_us: float) -> float:
        """The first rule's figure, if it is the one that reads costs."""
        return (self.first if self.first.needs_cost else self.second).own_cost_us(op, measured_us)


@dataclass(frozen=True)
class EitherKeeps(_Pair):
    """`a | b`: keep what either keeps."""

    by_place = _Pair.by_place
    steady = _Pair.steady

    def decide(self, op: OpInfo) -> Decision:
        """Keep if one says so."""
        kept = Decision.KEEP in (self.first.decide(op), self.second.decide(op))
        return Decision.KEEP if kept else Decision.RECOMPUTE

    def keeps_input_of(self, layer: int) -> bool:
        """If one says so."""
        return self.first.keeps_input_of(layer) or self.second.keeps_input_of(layer)


@dataclass(frozen=True)
class BothKeep(_Pair):
    """`a & b`: keep what both keep."""

    by_place = _Pair.by_place
    steady = _Pair.steady

    def decide(self, op: OpInfo) -> Decision:
        """Recompute if one says so."""
        dropped = Decision.RECOMPUTE in (self.first.decide(op), self.second.decide(op))
        return Decision.RECOMPUTE if dropped else Decision.KEEP

    def keeps_input_of(self, layer: int) -> bool:
        """If both say so."""
        return self.first.keeps_input_of(layer) and self.second.keeps_input_of(layer)


def as_policy(policy: Policy | Callable[[OpInfo], Decision]) -> Policy:
    """`policy` itself, or the callable wrapped as one."""
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
