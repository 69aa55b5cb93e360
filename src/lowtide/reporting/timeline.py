"""The course of one step under a plan: every moment, and who holds the live bytes in it.

Made by following the simulator, so that the bytes of every moment add up to exactly what it counts. A trace
knows the bytes of its values one by one; of everything else (parameters, gradients, optimizer state, what
backward takes and gives back) only the sum. `CATEGORIES` says how that sum is told apart, and how far.
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
    "parameters": "parameters, buffers and batch, as far as ops of forward read them",
    "gradients": "what backward takes beside values and does not give back before the step ends; an upper estimate",
    "kept": "values held from forward into backward, from the moment they are made",
    "recomputed": "values that a replay has made again",
    "temporary": "values of forward that are gone before backward, unwanted results of replays, and what backward "
    "takes beside values and gives back (gradients of activations, scratch)",
    "other": "alive during the whole step but read by no op of forward (optimizer state, other tensors), and values "
    "that the script itself holds into backward",
}
"""By kind of bytes: what is counted there."""
_PARAMETERS, _GRADIENTS, _KEPT, _RECOMPUTED, _TEMPORARY, _OTHER = range(len(CATEGORIES))

FORWARD, REPLAY, DECOMPRESS, BACKWARD = "forward", "replay", "unpacking", "backward"


@dataclass(frozen=True)
class Interval:
    """One op of forward, one replay, one value unpacked, or backward's own work after one ask."""

    phase: str
    """`FORWARD`, `REPLAY`, `DECOMPRESS` or `BACKWARD`."""
    op: int | None
    """The op that runs; in backward and unpacking the one that made the value, None for a value from outside."""
    unpack: int | None
    """None in forward."""
    start_s: float
    duration_s: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """The intervals of a step in order, with live bytes by kind and by module."""

    trace: Trace
    keep: tuple[bool, ...]
    """By op, as the engine obeys the decisions."""
    simulation: Simulation
    intervals: tuple[Interval, ...]
    category_bytes: Bytes
    """Moments × `CATEGORIES`."""
    modules: tuple[str, ...]
    """Kinds of modules ("h.*.mlp"), in the order of forward."""
    module_bytes: Bytes
    """Moments × `modules`: bytes of the values they made, and of replays of their ops."""
    other_bytes: Bytes
    """By moment: what is of no value, and so of no module."""
    codec_costs: tuple[CodecCost, ...] = ()
    """What values could be packed by."""

    @property
    def live_bytes(self) -> Bytes:
        """By moment: everything."""
        total: Bytes = self.category_bytes.sum(axis=1)
        return total

    @property
    def peak(self) -> int:
        """The fullest moment; the first of several."""
        return int(self.live_bytes.argmax())

    @property
    def forward_s(self) -> float:
        """When forward ends."""
        return max((m.start_s + m.duration_s for m in self.intervals if m.phase == FORWARD), default=0.0)

    @property
    def duration_s(self) -> float:
        """Of the whole step."""
        return self.intervals[-1].start_s + self.intervals[-1].duration_s if self.intervals else 0.0

    def describe(self, moment: int) -> str:
        """ "replay of aten.gelu.default in h.3.mlp" """
        at = self.intervals[moment]
        if at.op is None:
            return "backward, given something from outside"
        op = self.trace.ops[at.op]
        name = op.name + (f" in {op.module}" if op.module else "")
        words = {
            FORWARD: name,
            REPLAY: f"replay of {name}",
            DECOMPRESS: f"unpacking what {name} made",
            BACKWARD: f"backward, given what {name} made",
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
    """Play the decisions through one step; `written_before` has those that wait elsewhere, by `link` or `codec_costs`.

    `prefetch_after` has those of them that are read ahead.
    """
    simulator = Simulator(Problem(trace, link, codec_costs))
    effective_decisions = tuple(bool(kept) for kept in simulator.problem.effective_decisions(keep))
    modules = {name: number for number, name in enumerate(dict.fromkeys(module_pattern(op.module) for op in trace.ops))}
    reads = prefetch_after or {}
    census = _Census(simulator, effective_decisions, written_before or {}, reads, modules)
    simulation = simulator.run(
        keep,
        released,
        offload=written_before or (),
        written_before=written_before,
        prefetch_after=reads,
        watcher=census,
    )
    category_bytes = np.array(census.category_rows, dtype=np.int64).reshape(len(census.intervals), len(CATEGORIES))
    other_bytes = np.array([_other_bytes(trace, moment) for moment in census.intervals], dtype=np.int64)
    _split_other_bytes(trace, census.intervals, other_bytes, category_bytes)
    return Timeline(
        trace=trace,
        keep=effective_decisions,
        simulation=simulation,
        intervals=tuple(census.intervals),
        category_bytes=category_bytes,
        modules=tuple(modules),
        module_bytes=np.array(census.module_rows, dtype=np.int64).reshape(len(census.intervals), len(modules)),
        other_bytes=other_bytes,
        codec_costs=tuple(codec_costs),
    )


class _Census:
    """Counts the bytes of values, moment by moment; the simulator's watcher in backward."""

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
        self._ours = [_KEPT if producer >= 0 and keep[producer] else _RECOMPUTED for producer in problem.producer]
        self._kinds = np.zeros(len(CATEGORIES), dtype=np.int64)
        self._modules = np.zeros(len(modules), dtype=np.int64)
        self._now_s = 0.0
        timed_s = sum(op.time_s for op in trace.ops) + sum(unpack.time_s for unpack in trace.unpacks)
        # What no record accounts for is backward's: a profile leaves nothing over, a trace written by hand may.
        self._untimed_s = max(0.0, trace.step_s - timed_s) / max(1, problem.n_unpacks)
        held = frozenset(simulator.held_into_backward(keep, written_before))
        away = simulator.held_elsewhere(keep, written_before)
        packed = frozenset(v for v in away if problem.codec_cost[v] is not None)
        begun = [v for v in away if prefetch_after.get(problem.producer[v]) == WHEN_BACKWARD_BEGINS and v not in packed]
        self._walk_forward(simulator.forward_ends(keep, written_before), held, packed, begun)

    def _walk_forward(self, ends: list[int], held: frozenset[int], packed: frozenset[int], begun: list[int]) -> None:
        problem = self._problem
        fresh: list[int] = []  # what is packed before the next op runs
        goes_after: list[list[int]] = [[] for _ in range(problem.n_ops)]
        for j in range(problem.n_ops):
            for v in problem.outputs[j]:
                if ends[v] < problem.n_ops:
                    goes_after[ends[v]].append(v)
                    self._count(v, _TEMPORARY, 1)
                else:
                    self._count(v, _KEPT if v in held else _OTHER, 1)
            work = sum(p.workspace_bytes(problem.nbytes[v]) for v in fresh if (p := problem.codec_cost[v]) is not None)
            for v in fresh:
                self._hold(v, _KEPT, problem.resting_bytes(v))
            # What is read when backward begins is counted at the last op already, as its simulation does.
            for v in begun if j + 1 == problem.n_ops else ():
                self._count(v, _KEPT, 1)
            self._add(FORWARD, j, None, problem.time_s[j], work)
            fresh = [v for v in problem.outputs[j] if v in packed]
            for v in goes_after[j]:
                self._count(v, _TEMPORARY, -1)
        for v in begun:
            self._count(v, _KEPT, -1)
        for v in fresh:
            self._hold(v, _KEPT, problem.resting_bytes(v))

    def change(self, value: int, ours: int, others: int) -> None:
        """Copies of a value come or go."""
        self._count(value, self._ours[value], ours)
        self._count(value, _OTHER, others)

    def waits(self, seconds: float) -> None:
        """Time in which nothing runs."""
        self._now_s += seconds

    def decompresses(self, unpack: int, value: int, seconds: float, scratch_bytes: int) -> None:
        """A value is unpacked."""
        self._add(DECOMPRESS, self._problem.producer[value], unpack, seconds, scratch_bytes)

    def decompressed(self, value: int, compressed_bytes: int) -> None:
        """What was held of it goes."""
        self._hold(value, _KEPT, -compressed_bytes)

    def moment(self, unpack: int, replayed: int | None, scratch_bytes: int) -> None:
        """A replay runs, or an ask has been answered."""
        if replayed is not None:
            self._add(REPLAY, replayed, unpack, self._problem.replay_overhead_s[replayed], scratch_bytes)
            return
        producer = self._problem.producer[self._problem.ask_value[unpack]]
        own_s = self._problem.trace.unpacks[unpack].time_s + self._untimed_s
        self._add(BACKWARD, producer if producer >= 0 else None, unpack, own_s)

    def _count(self, value: int, kind: int, copies: int) -> None:
        self._hold(value, kind, copies * self._problem.nbytes[value])

    def _hold(self, value: int, kind: int, nbytes: int) -> None:
        self._kinds[kind] += nbytes
        self._modules[self._module[self._problem.producer[value]]] += nbytes

    def _add(self, phase: str, op: int | None, unpack: int | None, duration_s: float, scratch_bytes: int = 0) -> None:
        self.intervals.append(Interval(phase, op, unpack, self._now_s, duration_s))
        self._now_s += duration_s
        kinds, modules = self._kinds.copy(), self._modules.copy()
        if op is not None:
            kinds[_TEMPORARY] += scratch_bytes
            modules[self._module[op]] += scratch_bytes
        self.category_rows.append(kinds)
        self.module_rows.append(modules)


def _other_bytes(trace: Trace, moment: Interval) -> int:
    if moment.unpack is not None:
        unpack = trace.unpacks[moment.unpack]
        return unpack.other_bytes - (unpack.rise_bytes if moment.phase != BACKWARD else 0)
    assert moment.op is not None  # forward
    return trace.ops[moment.op].other_bytes


def _split_other_bytes(trace: Trace, intervals: list[Interval], other_bytes: Bytes, category_bytes: Bytes) -> None:
    """Add the bytes that are of no value to their kinds, as `CATEGORIES` explains them."""
    if not intervals:
        return
    sources: dict[int, int] = {}
    for value in trace.values:
        if value.op is None:
            sources[value.storage] = max(value.nbytes, sources.get(value.storage, 0))
    throughout = int(other_bytes.min())
    parameters = min(throughout, sum(sources.values()))
    # Never less from here to the end of the step: what is there now and stays.
    stays = np.minimum.accumulate(other_bytes[::-1])[::-1] - throughout
    in_backward = np.array([moment.phase != FORWARD for moment in intervals])
    gradients = np.where(in_backward, stays, 0)
    category_bytes[:, _PARAMETERS] += parameters
    category_bytes[:, _OTHER] += throughout - parameters
    category_bytes[:, _GRADIENTS] += gradients
    category_bytes[:, _TEMPORARY] += other_bytes - throughout - gradients
