"""A trace in the form that planning reads: plain lists, indexed by op, value or unpack.

A `Problem` is derived once per trace and takes no decisions. Sources are left out: they are always alive, and their
bytes are part of `other_bytes`.

An *offloaded* op is a kept op whose outputs leave memory between forward and backward. Each of them either goes to the
store, or is compressed by a codec and stays in memory in this smaller form.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .._errors import ArgumentError
from ..records import Trace
from ..records.codec_cost import CodecCost, suitable_codec_costs
from ..records.link import Link
from .bits import bits_of


class Problem:
    """The facts about a trace that planning reads repeatedly.

    With a `link`, values can be offloaded to a store; with `codec_costs`, they can be compressed.
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
        """By value: the op that produces it, -1 for a source."""
        self.time_s = [op.time_s for op in trace.ops]
        self.pinned = [op.pinned is not None for op in trace.ops]
        self.inputs = [[v for v in op.inputs if self.producer[v] >= 0] for op in trace.ops]
        """By op: its inputs, without sources."""
        self.replay_s = [
            (op.time_s if op.replay_s is None else op.replay_s) + trace.replay_overhead_s for op in trace.ops
        ]
        """By op: time of one replay, kernel and overhead."""
        self.workspace_bytes = [op.workspace_bytes for op in trace.ops]
        self.outputs = [list(op.outputs) for op in trace.ops]
        self.writes = [[w for w in op.writes if w.old is None or self.producer[w.old] >= 0] for op in trace.ops]
        self.overwritten_producers = [
            [self.producer[w.old] for w in op.writes if w.old is not None] for op in trace.ops
        ]
        """By op: the producers of the values that it overwrites and reads, -1 for a source."""
        self._in_place_ops = [j for j, producers in enumerate(self.overwritten_producers) if producers]
        self._always_kept = bits_of(j for j in self._in_place_ops if min(self.overwritten_producers[j]) < 0)
        self._in_place_bits = [
            (1 << j, bits_of(i for i in self.overwritten_producers[j] if i >= 0)) for j in self._in_place_ops
        ]
        self.consumers: list[list[int]] = [[] for _ in range(n_values)]
        for j, inputs in enumerate(self.inputs):
            for v in inputs:
                self.consumers[v].append(j)
        self.saved = [False] * n_values
        for v in trace.saved:
            self.saved[v] = self.producer[v] >= 0
        self._compute_lifetimes()
        self._compute_unpacks()
        self._choose_codecs()

    def _choose_codecs(self) -> None:
        """Decide how each value is offloaded: with an exact codec if there is one, else to the store, else lossily."""
        self.codec_cost: list[CodecCost | None] = [None] * self.n_values
        """By value: its codec if it is compressed when its op is offloaded."""
        storable = [self._is_storable(j) for j in range(self.n_ops)]
        self.uses_codec = [False] * self.n_ops
        """By op: True if offloading it compresses the outputs that have a codec, and nothing goes to the store."""
        for j in range(self.n_ops) if self.codec_costs else ():
            for v in self.outputs[j]:
                value = self.trace.values[v]
                suitable = suitable_codec_costs(self.codec_costs, value.dtype, value.nbytes, binary=value.binary)
                if not suitable or not self._can_leave_memory(v) or not (suitable[0].exact or not storable[j]):
                    continue
                self.codec_cost[v] = suitable[0]
                self.uses_codec[j] = True
        self.offloadable = [stores or compresses for stores, compresses in zip(storable, self.uses_codec, strict=True)]
        """By op: whether it can be offloaded."""

    def _is_storable(self, op: int) -> bool:
        """Return whether the outputs of an op can go to the store: there is one, and one of them is large enough."""
        outputs = self.outputs[op]
        return (
            self.link is not None
            and max((self.nbytes[v] for v in outputs), default=0) >= self.link.min_bytes
            and not self.writes[op]
            and all(self._can_leave_memory(v) for v in outputs)
        )

    def _can_leave_memory(self, value: int) -> bool:
        """Return whether offloading frees the memory: no later op overwrites it, and others do not hold it."""
        return not self.overwritten[value] and self.natural_last_unpack[value] < 0

    def offloaded_outputs(self, op: int) -> list[int]:
        """Return the outputs that leave memory if `op` is offloaded."""
        return [v for v in self.outputs[op] if not self.uses_codec[op] or self.codec_cost[v] is not None]

    def residual_bytes(self, value: int) -> int:
        """Return the bytes that a value takes in memory while its op is offloaded."""
        codec_cost = self.codec_cost[value]
        if codec_cost is not None:
            return codec_cost.compressed_bytes(self.nbytes[value])
        return self.nbytes[value] if self.uses_codec[self.producer[value]] else 0

    def _compute_lifetimes(self) -> None:
        """Compute how long each value is alive regardless of decisions."""
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
        """By value: whether a later value uses its memory."""
        self.natural_end = [-1] * self.n_values
        """By value: the last op during which others hold it; the number of ops or more: into backward."""
        self.natural_last_unpack = [-1] * self.n_values
        """By value: the last unpack during which others hold it, -1 if they do not hold it in backward."""
        for v, value in enumerate(trace.values):
            if self.producer[v] < 0:
                continue
            # An op holds its inputs while it runs, even if the profile saw them freed slightly earlier.
            end = max([min(value.held_until, n), *self.consumers[v][-1:]])
            at = overwritten_at[v]
            if at is not None:
                # From that op on the memory belongs to the next value. A handle then holds a private copy.
                end = min(end, at - 1)
            self.natural_end[v] = end
            if end >= n:
                self.natural_last_unpack[v] = value.held_until - n

    def _compute_unpacks(self) -> None:
        unpacks = self.trace.unpacks
        self.unpack_value = [unpack.value for unpack in unpacks]
        self.rise_bytes = [unpack.rise_bytes for unpack in unpacks]
        """By unpack: the part of its other bytes that is allocated after it, so not during its replays."""
        self.first_unpack = [self.n_unpacks] * self.n_values
        self.handle_end = [self.n_unpacks] * self.n_values
        """By value: the unpack after which its handle is freed; the number of unpacks if it is never unpacked."""
        self.freed_after: list[list[int]] = [[] for _ in unpacks]
        """By unpack: the values whose handles are freed after it."""
        self.last_unpack = [-1] * self.n_values
        self.unpacks_of: list[list[int]] = [[] for _ in range(self.n_values)]
        for k, unpack in enumerate(unpacks):
            self.last_unpack[unpack.value] = k
            self.unpacks_of[unpack.value].append(k)
            if self.producer[unpack.value] >= 0 and self.first_unpack[unpack.value] == self.n_unpacks:
                self.first_unpack[unpack.value] = k
        node_end = len(unpacks) - 1
        for k in range(len(unpacks) - 1, -1, -1):
            if k + 1 < len(unpacks) and unpacks[k + 1].node != unpacks[k].node:
                node_end = k
            v = unpacks[k].value
            if self.producer[v] >= 0 and self.last_unpack[v] == k:
                self.handle_end[v] = node_end
                self.freed_after[node_end].append(v)

    def check_decisions(
        self, keep: Sequence[int | bool], released: frozenset[int], offload: Collection[int] = ()
    ) -> None:
        """Raise `ArgumentError` for decisions that no engine can follow."""
        if len(keep) != self.n_ops:
            raise ArgumentError(f"{len(keep)} decisions for {self.n_ops} ops")
        for j, (kept, pinned) in enumerate(zip(keep, self.pinned, strict=True)):
            if pinned and not kept:
                op = self.trace.ops[j]
                raise ArgumentError(f"op {j} ({op.name} in {op.module!r}) cannot be recomputed: {op.pinned}")
        for j in released:
            if not 0 <= j < self.n_ops or keep[j]:
                raise ArgumentError(f"op {j} is released, but not recomputed")
        for j in offload:
            if not 0 <= j < self.n_ops or not keep[j]:
                raise ArgumentError(f"op {j} is offloaded, but not kept")
            if not self.offloadable[j]:
                raise ArgumentError(f"op {j} ({self.trace.ops[j].name}) cannot be offloaded")

    def effective_decisions(self, keep: Sequence[int | bool]) -> Sequence[int | bool]:
        """Return the decisions as the engine executes them.

        An op that overwrites a kept value in place is kept too: its input no longer exists in backward.
        """
        if not any(
            not keep[j] and any(i < 0 or keep[i] for i in self.overwritten_producers[j]) for j in self._in_place_ops
        ):
            return keep
        effective_decisions = list(keep)
        for j in self._in_place_ops:
            effective_decisions[j] = effective_decisions[j] or any(
                i < 0 or effective_decisions[i] for i in self.overwritten_producers[j]
            )
        return effective_decisions

    def effective_bits(self, keep: int) -> int:
        """Return the same as `effective_decisions`, for the kept ops as a bit set (`bits`)."""
        keep |= self._always_kept
        for in_place_op, producers in self._in_place_bits:
            if keep & producers and not keep & in_place_op:
                keep |= in_place_op
        return keep

    def keep_all(self) -> list[bool]:
        """Return the decisions of plain PyTorch."""
        return [True] * self.n_ops

    def recompute_all(self) -> list[bool]:
        """Return the decisions that recompute every op that is not pinned."""
        return list(self.pinned)
