"""A trace in the shape in which simulator and solvers read it: plain lists indexed by op, value and ask.

Derived once per trace. Sources are gone (they are always there, and their bytes are among the other bytes);
natural lifetimes are settled. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .._errors import ArgumentError
from ..records import Trace
from ..records.codec_cost import CodecCost, suitable_codec_costs
from ..records.link import Link
from .bits import bits_of


class Problem:
    """Everything about a trace that planning looks at again and again.

    With a `link` or `codec_costs`, values may wait elsewhere than whole in memory: in a store, or packed.
    """

    def __init__(self, trace: Trace, link: Link | None = None, codec_costs: Sequence[CodecCost] = ()) -> None:
        self.trace = trace
        self.link = link
        self.codec_costs = tuple(codec_costs)
        n, n_values = len(trace.ops), len(trace.values)
        self.n_ops = n
        self.n_values = n_values
        self.n_unpacks = len(trace.unpacks)
        self.nbytes = [value.nbytes for value in trace.values]
        self.producer = [-1 if value.made_at is None else value.made_at for value in trace.values]
        self.time_s = [op.time_s for op in trace.ops]
        self.pinned = [op.pinned is not None for op in trace.ops]
        self.inputs = [[v for v in op.inputs if self.producer[v] >= 0] for op in trace.ops]
        """By op, without sources."""
        self.replay_overhead_s = [
            (op.time_s if op.replay_s is None else op.replay_s) + trace.replay_overhead_s for op in trace.ops
        ]
        """By op: what making it again takes. What it reads is not in the caches any more, as far as we know."""
        self.outputs = [list(op.outputs) for op in trace.ops]
        self.writes = [[w for w in op.writes if w.old is None or self.producer[w.old] >= 0] for op in trace.ops]
        self.over = [[self.producer[w.old] for w in op.writes if w.old is not None] for op in trace.ops]
        """By op: the makers of the values that it overwrites and reads."""
        self._rewriters = [j for j, makers in enumerate(self.over) if makers]
        self._always_kept = bits_of(j for j in self._rewriters if min(self.over[j]) < 0)
        self._rewriter_bits = [(1 << j, bits_of(i for i in self.over[j] if i >= 0)) for j in self._rewriters]
        self.consumers: list[list[int]] = [[] for _ in range(n_values)]
        for j, inputs in enumerate(self.inputs):
            for v in inputs:
                self.consumers[v].append(j)
        self.saved = [False] * n_values
        for v in trace.saved:
            self.saved[v] = self.producer[v] >= 0
        self._settle_natural_lifetimes()
        self._settle_unpacks()
        self._settle_ways()

    def _settle_ways(self) -> None:
        """Which values may wait elsewhere, and how: packed if that is exact or there is no store, else in the store."""
        self.codec_cost: list[CodecCost | None] = [None] * self.n_values
        """By value: how it is packed, if it is."""
        self.offloadable = [self._can_move(j) for j in range(self.n_ops)]
        """By op: whether what it makes may wait elsewhere."""
        self.packed = [False] * self.n_ops
        """By op: whether elsewhere means packed, for those of its values for which there is a packing."""
        for j in range(self.n_ops) if self.codec_costs else ():
            for v in self.outputs[j]:
                value = self.trace.values[v]
                suitable = suitable_codec_costs(self.codec_costs, value.dtype, value.nbytes, binary=value.binary)
                if not suitable or not self._is_settled(v) or not (suitable[0].exact or not self.offloadable[j]):
                    continue
                self.codec_cost[v] = suitable[0]
                self.packed[j] = True
        self.offloadable = [moves or packed for moves, packed in zip(self.offloadable, self.packed, strict=True)]

    def _can_move(self, op: int) -> bool:
        """Whether what it makes may wait in a store: large enough, and nobody else's."""
        made = self.outputs[op]
        return (
            self.link is not None
            and max((self.nbytes[v] for v in made), default=0) >= self.link.min_bytes
            and not self.writes[op]
            and all(self._is_settled(v) for v in made)
        )

    def _is_settled(self, value: int) -> bool:
        """In memory that nobody writes again, and not there until backward anyway."""
        return not self.overwritten[value] and self.natural_last_unpack[value] < 0

    def moved(self, op: int) -> list[int]:
        """Of what an op makes: the values that wait elsewhere, if it is so decided."""
        return [v for v in self.outputs[op] if not self.packed[op] or self.codec_cost[v] is not None]

    def residual_bytes(self, value: int) -> int:
        """What a value takes in memory meanwhile."""
        codec_cost = self.codec_cost[value]
        if codec_cost is not None:
            return codec_cost.compressed_bytes(self.nbytes[value])
        return self.nbytes[value] if self.packed[self.producer[value]] else 0

    def _settle_natural_lifetimes(self) -> None:
        """Until when each value is there whatever we decide: `natural_end` (op), then `natural_last_unpack` (ask)."""
        trace, n = self.trace, self.n_ops
        overwritten_at: list[int | None] = [None] * self.n_values
        latest: dict[int, int] = {}
        for op in trace.ops:
            for v in op.outputs:
                storage = trace.values[v].storage
                if storage in latest and self.producer[v] >= 0:
                    overwritten_at[latest[storage]] = self.producer[v]
                latest[storage] = v
        self.overwritten = [at is not None for at in overwritten_at]
        """By value: whether its memory is another value's later."""
        self.natural_end = [-1] * self.n_values
        self.natural_last_unpack = [-1] * self.n_values
        for v, value in enumerate(trace.values):
            if self.producer[v] < 0:
                continue
            # Whoever reads a value holds it meanwhile, even where the profile saw it go a moment earlier.
            end = max([min(value.held_until, n), *self.consumers[v][-1:]])
            over = overwritten_at[v]
            if over is not None:
                # From that op on the memory is the next value's; what is held of this one is a private copy.
                end = min(end, over - 1)
            self.natural_end[v] = end
            if end >= n:
                self.natural_last_unpack[v] = value.held_until - n

    def _settle_unpacks(self) -> None:
        unpacks = self.trace.unpacks
        self.unpack_value = [unpack.value for unpack in unpacks]
        self.rise_bytes = [unpack.rise_bytes for unpack in unpacks]
        """By ask: what backward takes once it is answered, so not while something is replayed for it."""
        self.node_ends = [
            k + 1 == len(unpacks) or unpacks[k + 1].node != unpack.node for k, unpack in enumerate(unpacks)
        ]
        self.first_unpack = [self.n_unpacks] * self.n_values
        self.handle_end = [self.n_unpacks] * self.n_values
        """The ask after which the handle is gone; the number of asks if that is never asked."""
        self.freed_after: list[list[int]] = [[] for _ in unpacks]
        """By ask: the values whose handles go after it."""
        self.last_unpack = [-1] * self.n_values
        self.unpacks_of: list[list[int]] = [[] for _ in range(self.n_values)]
        for k, unpack in enumerate(unpacks):
            self.last_unpack[unpack.value] = k
            self.unpacks_of[unpack.value].append(k)
            if self.producer[unpack.value] >= 0 and self.first_unpack[unpack.value] == self.n_unpacks:
                self.first_unpack[unpack.value] = k
        node_end = len(unpacks) - 1
        for k in range(len(unpacks) - 1, -1, -1):
            if self.node_ends[k]:
                node_end = k
            v = unpacks[k].value
            if self.producer[v] >= 0 and self.last_unpack[v] == k:
                self.handle_end[v] = node_end
                self.freed_after[node_end].append(v)

    def check_decisions(
        self, keep: Sequence[int | bool], released: frozenset[int], offload: Collection[int] = ()
    ) -> None:
        """Raise `ArgumentError` for decisions that no engine could follow."""
        if len(keep) != self.n_ops:
            raise ArgumentError(f"{len(keep)} decisions for {self.n_ops} ops")
        for j, (kept, pinned) in enumerate(zip(keep, self.pinned, strict=True)):
            if pinned and not kept:
                op = self.trace.ops[j]
                raise ArgumentError(f"op {j} ({op.name} in {op.module!r}) cannot be recomputed: {op.pinned}")
        for j in released:
            if not 0 <= j < self.n_ops or keep[j]:
                raise ArgumentError(f"op {j} is to be made again more than once, but is not to be recomputed")
        for j in offload:
            if not 0 <= j < self.n_ops or not keep[j]:
                raise ArgumentError(f"op {j} is to be offloaded, but is not to be kept")
            if not self.offloadable[j]:
                raise ArgumentError(f"op {j} ({self.trace.ops[j].name}) makes nothing that could wait elsewhere")

    def effective_decisions(self, keep: Sequence[int | bool]) -> Sequence[int | bool]:
        """The decisions as the engine obeys them: what is written over memory that is kept cannot be made again."""
        if not any(not keep[j] and any(i < 0 or keep[i] for i in self.over[j]) for j in self._rewriters):
            return keep
        effective_decisions = list(keep)
        for j in self._rewriters:
            effective_decisions[j] = effective_decisions[j] or any(
                i < 0 or effective_decisions[i] for i in self.over[j]
            )
        return effective_decisions

    def effective_bits(self, keep: int) -> int:
        """The same of the set of ops that are kept (`bits`)."""
        keep |= self._always_kept
        for rewriter, over in self._rewriter_bits:
            if keep & over and not keep & rewriter:
                keep |= rewriter
        return keep

    def keep_all(self) -> list[bool]:
        """The decisions of plain PyTorch."""
        return [True] * self.n_ops

    def recompute_all(self) -> list[bool]:
        """Recompute whatever can be."""
        return list(self.pinned)
