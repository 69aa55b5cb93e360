"""Timeline of one step under a plan: consecutive intervals, with live bytes by category and by module.

The simulator reports its events to a byte counter, so the bytes of every interval add up to the live bytes
of the simulation. A trace has the size of each value. For all other memory (parameters, gradients,
optimizer state, temporaries of backward) it has only the sum. `CATEGORIES` describes how that sum is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..planning import CodecCost, Link, Problem, Simulation, Simulator
from ..planning.summary import module_pattern
from ..records import Trace
from ..records.plan import WHEN_BACKWARD_BEGINS

Bytes = npt.NDArray[np.int64]

CATEGORIES = {
    "parameters": "parameters, buffers and batch that ops of forward read",
    "gradients": "memory that backward allocates and that stays until the step ends; an upper estimate",
    "kept": "values held from forward into backward",
    "recomputed": "values that a replay has recomputed",
    "temporary": "values of forward that are freed before backward, unused outputs of replays, and memory that "
    "backward allocates and frees (gradients of activations, scratch)",
    "other": "memory that is live during the whole step and not read in forward (optimizer state, other tensors), "
    "and values that the training script holds into backward",
}
"""Description of each category of live bytes."""
_PARAMETERS, _GRADIENTS, _KEPT, _RECOMPUTED, _TEMPORARY, _OTHER = range(len(CATEGORIES))

FORWARD, REPLAY, DECOMPRESS, BACKWARD = "forward", "replay", "decompress", "backward"


@dataclass(frozen=True)
class Interval:
    """One op of forward, one replay, one decompression, or the work of backward after one unpack."""

    phase: str
    """`FORWARD`, `REPLAY`, `DECOMPRESS` or `BACKWARD`."""
    op: int | None
    """Index of the op that runs. In backward and decompress: the op that produced the value, None for a source."""
    unpack: int | None
    """Index of the unpack; None in forward."""
    start_s: float
    duration_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """The intervals of a step in order, with live bytes by category and by module."""

    trace: Trace
    keep: tuple[bool, ...]
    """Effective decision for each op, as the engine executes the plan."""
    simulation: Simulation
    intervals: tuple[Interval, ...]
    category_bytes: Bytes
    """Shape: intervals × `CATEGORIES`."""
    modules: tuple[str, ...]
    """Module patterns ("h.*.mlp"), in the order of forward."""
    module_bytes: Bytes
    """Shape: intervals × `modules`. Bytes of the values that the ops of a module produced, also in replays."""
    other_bytes: Bytes
    """Per interval: bytes that belong to no value, and so to no module."""
    codec_costs: tuple[CodecCost, ...] = ()
    """Codecs available to the plan."""

    @property
    def live_bytes(self) -> Bytes:
        """Live bytes of each interval."""
        total: Bytes = self.category_bytes.sum(axis=1)
        return total

    @property
    def peak(self) -> int:
        """Index of the first interval with the most live bytes."""
        return int(self.live_bytes.argmax())

    @property
    def forward_s(self) -> float:
        """End of forward."""
        return max((m.start_s + m.duration_s for m in self.intervals if m.phase == FORWARD), default=0.0)

    @property
    def duration_s(self) -> float:
        """Duration of the step."""
        return self.intervals[-1].start_s + self.intervals[-1].duration_s if self.intervals else 0.0

    def describe(self, index: int) -> str:
        """Return a description of an interval, such as "replay of aten.gelu.default in h.3.mlp"."""
        at = self.intervals[index]
        if at.op is None:
            return "backward, after unpacking a tensor from outside the step"
        op = self.trace.ops[at.op]
        name = op.name + (f" in {op.module}" if op.module else "")
        words = {
            FORWARD: name,
            REPLAY: f"replay of {name}",
            DECOMPRESS: f"decompression of the output of {name}",
            BACKWARD: f"backward, after unpacking the output of {name}",
        }
        return words[at.phase]


def build_timeline(
    trace: Trace,
    keep: Sequence[bool],
    released: Iterable[int] = (),
    written_before: Mapping[int, int] | None = None,
    link: Link | None = None,
    codec_costs: Sequence[CodecCost] = (),
    prefetch_after: Mapping[int, int] | None = None,
) -> Timeline:
    """Simulate one step under these decisions and return its timeline.

    `written_before` maps ops whose values are offloaded or compressed to the op before which that is done.
    `prefetch_after` maps prefetched ops to the op whose first fetch starts the prefetch.
    """
    simulator = Simulator(Problem(trace, link, codec_costs))
    effective_decisions = tuple(bool(kept) for kept in simulator.problem.effective_decisions(keep))
    modules = {name: number for number, name in enumerate(dict.fromkeys(module_pattern(op.module) for op in trace.ops))}
    prefetches = prefetch_after or {}
    counter = _ByteCounter(simulator, effective_decisions, written_before or {}, prefetches, modules)
    simulation = simulator.run(
        keep,
        released,
        offload=written_before or (),
        written_before=written_before,
        prefetch_after=prefetches,
        listener=counter,
    )
    category_bytes = np.array(counter.category_rows, dtype=np.int64).reshape(len(counter.intervals), len(CATEGORIES))
    other_bytes = np.array([_other_bytes(trace, interval) for interval in counter.intervals], dtype=np.int64)
    _split_other_bytes(trace, counter.intervals, other_bytes, category_bytes)
    return Timeline(
        trace=trace,
        keep=effective_decisions,
        simulation=simulation,
        intervals=tuple(counter.intervals),
        category_bytes=category_bytes,
        modules=tuple(modules),
        module_bytes=np.array(counter.module_rows, dtype=np.int64).reshape(len(counter.intervals), len(modules)),
        other_bytes=other_bytes,
        codec_costs=tuple(codec_costs),
    )


class _ByteCounter:
    """Counts the live bytes of values in every interval. The simulator reports the events of backward."""

    def __init__(
        self,
        simulator: Simulator,
        keep: Sequence[bool],
        written_before: Mapping[int, int],
        prefetch_after: Mapping[int, int],
        modules: dict[str, int],
    ) -> None:
        problem = simulator.problem
        trace = problem.trace
        self.intervals: list[Interval] = []
        self.category_rows: list[Bytes] = []
        self.module_rows: list[Bytes] = []
        self._problem = problem
        self._module = [modules[module_pattern(op.module)] for op in trace.ops]
        self._resident_category = [_KEPT if j >= 0 and keep[j] else _RECOMPUTED for j in problem.producer]
        self._categories = np.zeros(len(CATEGORIES), dtype=np.int64)
        self._modules = np.zeros(len(modules), dtype=np.int64)
        self._now_s = 0.0
        timed_s = sum(op.time_s for op in trace.ops) + sum(unpack.time_s for unpack in trace.unpacks)
        # Time that no record covers belongs to backward. Only hand-written traces have such time.
        self._untimed_s = max(0.0, trace.step_s - timed_s) / max(1, problem.n_unpacks)
        held = frozenset(simulator.held_into_backward(keep, written_before))
        stored = simulator.offloaded_into_backward(keep, written_before)
        compressed = frozenset(v for v in stored if problem.codec_cost[v] is not None)
        prefetched = [
            v for v in stored if prefetch_after.get(problem.producer[v]) == WHEN_BACKWARD_BEGINS and v not in compressed
        ]
        self._count_forward(simulator.forward_ends(keep, written_before), held, compressed, prefetched)

    def _count_forward(
        self, ends: list[int], held: frozenset[int], compressed: frozenset[int], prefetched: list[int]
    ) -> None:
        problem = self._problem
        to_compress: list[int] = []  # compressed before the next op runs
        freed_after: list[list[int]] = [[] for _ in range(problem.n_ops)]
        for j in range(problem.n_ops):
            for v in problem.outputs[j]:
                if ends[v] < problem.n_ops:
                    freed_after[ends[v]].append(v)
                    self._count(v, _TEMPORARY, 1)
                else:
                    self._count(v, _KEPT if v in held else _OTHER, 1)
            scratch_bytes = sum(
                cost.workspace_bytes(problem.nbytes[v])
                for v in to_compress
                if (cost := problem.codec_cost[v]) is not None
            )
            for v in to_compress:
                self._hold(v, _KEPT, problem.residual_bytes(v))
            # Prefetches at the start of backward are counted at the last op, as in the simulation.
            for v in prefetched if j + 1 == problem.n_ops else ():
                self._count(v, _KEPT, 1)
            self._add(FORWARD, j, None, problem.time_s[j], scratch_bytes)
            to_compress = [v for v in problem.outputs[j] if v in compressed]
            for v in freed_after[j]:
                self._count(v, _TEMPORARY, -1)
        for v in prefetched:
            self._count(v, _KEPT, -1)
        for v in to_compress:
            self._hold(v, _KEPT, problem.residual_bytes(v))

    def copies_changed(self, value: int, own: int, others: int) -> None:
        """Add or remove copies of a value, held by the engine or by others."""
        self._count(value, self._resident_category[value], own)
        self._count(value, _OTHER, others)

    def waited(self, seconds: float) -> None:
        """Add time in which no op runs."""
        self._now_s += seconds

    def decompressed(self, unpack: int, value: int, seconds: float, scratch_bytes: int) -> None:
        """Add the decompression of a value."""
        self._add(DECOMPRESS, self._problem.producer[value], unpack, seconds, scratch_bytes)

    def compressed_freed(self, value: int, compressed_bytes: int) -> None:
        """Release the compressed form of a value."""
        self._hold(value, _KEPT, -compressed_bytes)

    def replayed(self, unpack: int, op: int, scratch_bytes: int) -> None:
        """Add a replay."""
        self._add(REPLAY, op, unpack, self._problem.replay_s[op], scratch_bytes)

    def unpacked(self, unpack: int) -> None:
        """Add the work of backward after an unpack."""
        producer = self._problem.producer[self._problem.unpack_value[unpack]]
        own_s = self._problem.trace.unpacks[unpack].time_s + self._untimed_s
        self._add(BACKWARD, producer if producer >= 0 else None, unpack, own_s)

    def _count(self, value: int, category: int, copies: int) -> None:
        self._hold(value, category, copies * self._problem.nbytes[value])

    def _hold(self, value: int, category: int, nbytes: int) -> None:
        self._categories[category] += nbytes
        self._modules[self._module[self._problem.producer[value]]] += nbytes

    def _add(self, phase: str, op: int | None, unpack: int | None, duration_s: float, scratch_bytes: int = 0) -> None:
        self.intervals.append(Interval(phase, op, unpack, self._now_s, duration_s))
        self._now_s += duration_s
        categories, modules = self._categories.copy(), self._modules.copy()
        if op is not None:
            categories[_TEMPORARY] += scratch_bytes
            modules[self._module[op]] += scratch_bytes
        self.category_rows.append(categories)
        self.module_rows.append(modules)


def _other_bytes(trace: Trace, interval: Interval) -> int:
    if interval.unpack is not None:
        unpack = trace.unpacks[interval.unpack]
        return unpack.other_bytes - (unpack.rise_bytes if interval.phase != BACKWARD else 0)
    assert interval.op is not None  # forward
    return trace.ops[interval.op].other_bytes


def _split_other_bytes(trace: Trace, intervals: list[Interval], other_bytes: Bytes, category_bytes: Bytes) -> None:
    """Split the bytes that belong to no value into categories, as described in `CATEGORIES`."""
    if not intervals:
        return
    sources: dict[int, int] = {}
    for value in trace.values:
        if value.made_at is None:
            sources[value.storage] = max(value.nbytes, sources.get(value.storage, 0))
    constant_bytes = int(other_bytes.min())
    parameters = min(constant_bytes, sum(sources.values()))
    # Minimum from here to the end of the step: bytes that are live now and stay.
    lasting_bytes = np.minimum.accumulate(other_bytes[::-1])[::-1] - constant_bytes
    is_backward = np.array([interval.phase != FORWARD for interval in intervals])
    gradients = np.where(is_backward, lasting_bytes, 0)
    category_bytes[:, _PARAMETERS] += parameters
    category_bytes[:, _OTHER] += constant_bytes - parameters
    category_bytes[:, _GRADIENTS] += gradients
    category_bytes[:, _TEMPORARY] += other_bytes - constant_bytes - gradients
