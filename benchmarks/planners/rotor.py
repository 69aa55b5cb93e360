"""The planner rotor: the best persistent schedule for a chain of blocks. A baseline.

After Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains" (2019).
For the first block of a part of the chain there are two choices. Its values are kept, or a checkpoint is set before a
later block: the blocks up to there run forward with only their input and output held, the blocks after the checkpoint
are reversed first, and then these blocks by the same rule. A persistent schedule holds each checkpoint until its use.
A dynamic program finds the fastest persistent schedule, with sizes rounded up to slots.

lowtide's engine executes a schedule exactly if it runs no block more than twice; others occur only if memory is very
short. The engine's decisions hold for a whole step, so longer schedules are approximated:

- A block that runs three times or more is retained at no replay. Each of its saved values is replayed from the last
  checkpoint on its unpack; rotor would replay all of them at once.
- A checkpoint that is set during a replay is held from the first replay of its value on.

Steps that are not chains are handled conservatively: values that are read beyond the next block are always kept, as
are values of pinned ops.

The simulator knows the memory of a plan more precisely than the dynamic program. So the schedules of all slot counts,
up to slightly more than the budget, are simulated, and the fastest one that fits is returned.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lowtide.planning.candidate import Candidate, judge_decisions
from lowtide.planning.problem import Problem
from lowtide.planning.repetition import find_repeated_blocks
from lowtide.planning.rows import Floats
from lowtide.planning.segments import block_cuts, crossing_bytes, layers_of
from lowtide.planning.simulator import Bytes, Simulator

_SLOTS = 300
_SLOT_SURPLUS = 1.15
"""Slots of the dynamic program over those of the budget. Sizes are rounded up, so a schedule above it may fit."""
_NEIGHBOURS = 8
"""Number of schedules that are simulated on each side of the bisection's result."""
_KEEP_FIRST = 0
"""The choice to keep the values of the first block. Other choices are the block before which a checkpoint is set."""


@dataclass(frozen=True)
class Block:
    """Time and memory of a block, in any unit of memory. The input of the block is not counted."""

    time_s: float
    kept: int
    """Size of all values for backward, the output included."""
    output: int
    """Size of the output."""
    forward_peak: int
    """Peak of a forward run that holds only the output."""
    peak: int
    """Peak of forward and backward with all values kept."""


class DynamicProgram:
    """The fastest schedule for each part of a chain, with each number of slots up to `slots`."""

    def __init__(self, blocks: Sequence[Block], slots: int) -> None:
        n = self.n = len(blocks)
        self.blocks = blocks
        self.slots = slots
        self._cost: dict[tuple[int, int], Floats] = {}
        self._choice: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        start_s = np.concatenate([[0.0], np.cumsum([block.time_s for block in blocks])])
        memory_budget = np.arange(slots + 1)
        for length in range(1, n + 1):
            for first in range(n - length + 1):
                last = first + length - 1
                block = blocks[first]
                best = np.full(slots + 1, np.inf)
                choice = np.full(slots + 1, _KEEP_FIRST, dtype=np.int64)
                if length == 1:
                    best[block.peak :] = block.time_s
                else:
                    best = block.time_s + _with_fewer_slots(self._cost[first + 1, last], block.kept)
                    best[: block.peak] = np.inf
                forward_peak = 0
                for cut in range(first + 1, last + 1):
                    before = blocks[cut - 1]
                    forward_peak = max(forward_peak, before.forward_peak)
                    cost = _with_fewer_slots(self._cost[cut, last], before.output) + self._cost[first, cut - 1]
                    cost += start_s[cut] - start_s[first]
                    better = (cost < best) & (memory_budget >= forward_peak)
                    best[better] = cost[better]
                    choice[better] = cut
                self._cost[first, last] = best
                self._choice[first, last] = choice

    def time_s(self, slots: int) -> float:
        """Return the time of all forward runs, the first ones included; infinite if no schedule fits."""
        return float(self._cost[0, self.n - 1][slots])

    def schedule(self, slots: int) -> Schedule:
        """Return the schedule with this time."""
        schedule = Schedule()
        pending = [(0, self.n - 1, slots, False)]
        while pending:
            first, last, memory_budget, replaying = pending.pop()
            while first <= last:
                cut = int(self._choice[first, last][memory_budget])
                if cut == _KEEP_FIRST:
                    if not replaying:
                        schedule.kept.add(first)
                    memory_budget -= self.blocks[first].kept
                    first += 1
                    continue
                if replaying:
                    schedule.rerun.update(range(first, cut))
                    schedule.retained.add(cut - 1)
                else:
                    schedule.checkpoints.add(cut - 1)
                pending.append((first, cut - 1, memory_budget, True))
                memory_budget -= self.blocks[cut - 1].output
                first = cut
        return schedule


@dataclass
class Schedule:
    """Decisions of rotor: sets of blocks."""

    kept: set[int] = field(default_factory=set)
    """All values are kept from forward on."""
    checkpoints: set[int] = field(default_factory=set)
    """The output is kept from forward on."""
    retained: set[int] = field(default_factory=set)
    """The output is retained from a replay on."""
    rerun: set[int] = field(default_factory=set)
    """Blocks that are replayed more than once."""


def solve_rotor(simulator: Simulator, budget_bytes: int) -> Candidate | None:
    """Return the fastest schedule that fits; None without consecutive blocks, or if no schedule fits."""
    chain = _Chain(simulator)
    if len(chain.cuts) < 2:
        return None
    constant_bytes = min(min(block.peak, block.forward_peak) for block in chain.blocks)
    limit_bytes = budget_bytes - constant_bytes
    if limit_bytes <= 0:
        return None
    # Bytes that are always alive take no slots.
    slot_bytes = -(-limit_bytes // _SLOTS)
    program = DynamicProgram(
        [_to_slots(block, slot_bytes, constant_bytes) for block in chain.blocks], int(_SLOTS * _SLOT_SURPLUS)
    )
    decisions_by_slots: list[tuple[tuple[bool, ...], frozenset[int]]] = []
    """Distinct decisions, from the fewest slots to the most."""
    for slots in range(program.slots + 1):
        if program.time_s(slots) < np.inf:
            decisions = chain.decisions(program.schedule(slots))
            if not decisions_by_slots or decisions != decisions_by_slots[-1]:
                decisions_by_slots.append(decisions)
    return _fastest(simulator, decisions_by_slots, budget_bytes)


def _fastest(
    simulator: Simulator, decisions_by_slots: list[tuple[tuple[bool, ...], frozenset[int]]], budget_bytes: int
) -> Candidate | None:
    """Return the fastest plan around the last one that fits, which bisection finds.

    The neighbours are simulated too, because peaks are not exactly in the order of slots.
    """
    fitting: dict[int, Candidate] = {}

    def fits(index: int) -> bool:
        candidate = judge_decisions(simulator, *decisions_by_slots[index], solver="rotor")
        if candidate is not None and candidate.peak_bytes <= budget_bytes:
            fitting[index] = candidate
        return index in fitting

    last = bisect.bisect_left(range(len(decisions_by_slots)), True, key=lambda index: not fits(index)) - 1
    for index in range(max(0, last - _NEIGHBOURS), min(len(decisions_by_slots), last + 1 + _NEIGHBOURS)):
        if index not in fitting:
            fits(index)
    return min(fitting.values(), key=lambda one: one.extra_s, default=None)


class _Chain:
    """A step as a chain of blocks, with sizes from the simulator."""

    def __init__(self, simulator: Simulator) -> None:
        self.problem = problem = simulator.problem
        self.cuts = _cuts(problem)
        self.n = len(self.cuts) + 1
        self.block_of = [bisect.bisect_left(self.cuts, j) for j in range(problem.n_ops)]
        self.always_kept = problem.recompute_all()
        self.outputs: list[set[int]] = [set() for _ in range(self.n)]
        """Values of each block that the next block reads."""
        self._find_outputs()
        self.blocks = self._measured(simulator) if len(self.cuts) > 1 else []

    def _find_outputs(self) -> None:
        problem, block_of = self.problem, self.block_of
        for v in range(problem.n_values):
            producer = problem.producer[v]
            if producer < 0 or self.always_kept[producer]:
                continue
            last = max((block_of[j] for j in problem.consumers[v]), default=-1)
            if last > block_of[producer] + 1:
                self.always_kept[producer] = True
            elif last > block_of[producer]:
                self.outputs[block_of[producer]].add(v)

    def decisions(self, schedule: Schedule) -> tuple[tuple[bool, ...], frozenset[int]]:
        """Return the decisions for the engine: which ops are kept, and which are released after a replay."""
        producer = self.problem.producer
        keep = [always or self.block_of[j] in schedule.kept for j, always in enumerate(self.always_kept)]
        for block in schedule.checkpoints:
            for v in self.outputs[block]:
                keep[producer[v]] = True
        retained = {producer[v] for block in schedule.retained for v in self.outputs[block]}
        released = {j for j, block in enumerate(self.block_of) if block in schedule.rerun and not keep[j]}
        return tuple(keep), frozenset(released - retained)

    def _measured(self, simulator: Simulator) -> list[Block]:
        """Return the blocks, with sizes from two simulations: all values kept, and a checkpoint on every block."""
        problem, n = self.problem, self.n
        output, kept, time_s = [0] * n, [0] * n, [0.0] * n
        for j, block in enumerate(self.block_of):
            if self.always_kept[j]:
                continue
            time_s[block] += problem.replay_s[j]
            for v in problem.outputs[j]:
                is_output = v in self.outputs[block]
                output[block] += problem.nbytes[v] if is_output else 0
                kept[block] += problem.nbytes[v] if is_output or problem.saved[v] else 0
        all_kept = simulator.run(problem.keep_all())
        every_block = Schedule(kept={n - 1}, checkpoints=set(range(n - 1)))
        replayed = simulator.run(self.decisions(every_block)[0])
        unpacks = self._blocks_of_unpacks()
        forward_peak = self._peaks(replayed.forward_live, self.block_of, output)
        kept_peaks = [
            self._peaks(all_kept.forward_live, self.block_of, kept),
            self._peaks(all_kept.unpack_live, unpacks, kept),
        ]
        replayed_peak = self._peaks(replayed.unpack_live, unpacks, output)
        return [
            Block(
                time_s[i],
                kept[i],
                output[i],
                forward_peak[i],
                max(kept_peaks[0][i], kept_peaks[1][i], replayed_peak[i]),
            )
            for i in range(n)
        ]

    def _blocks_of_unpacks(self) -> list[int]:
        """Return the block in which backward is at each unpack: the last block whose values it has reached."""
        problem = self.problem
        result, current = [], self.n - 1
        for v in problem.unpack_value:
            producer = problem.producer[v]
            if producer >= 0 and not self.always_kept[producer]:
                # The next block unpacks the outputs of a block too.
                current = min(current, self.block_of[producer] + (v in self.outputs[self.block_of[producer]]))
            result.append(current)
        return result

    def _peaks(self, live: Bytes, block_of: list[int], held: list[int]) -> list[int]:
        """Return the peak of live bytes in each block, without the bytes that earlier blocks hold."""
        before = np.concatenate([[0], np.cumsum(held)[:-1]])
        peaks = [0] * self.n
        for nbytes, block in zip(live.tolist(), block_of, strict=True):
            peaks[block] = max(peaks[block], int(nbytes - before[block]))
        return peaks


def _cuts(problem: Problem) -> list[int]:
    """Return the ops after which a block ends. Ops before and after a stack of blocks are blocks too.

    Cuts are between layers if module names show them and not more bytes cross there than at the narrowest cuts.
    """
    repeats = find_repeated_blocks(problem)
    narrow = block_cuts(problem, repeats)
    crossing, layers = crossing_bytes(problem), layers_of(problem)
    # Without repeated blocks (the experts of each layer get different tokens) the median over all ops is the limit.
    widest = crossing[narrow].max() if narrow else float(np.median(crossing)) if len(crossing) else 0.0
    named = [j for j in range(problem.n_ops - 1) if layers[j] != layers[j + 1] and crossing[j] <= widest]
    if len(named) >= len(narrow):
        return named
    ends = {j - 1 for one in repeats for j in (one.start, one.start + one.blocks * one.period)}
    return sorted({*narrow, *ends} - {-1, problem.n_ops - 1})


def _with_fewer_slots(cost: Floats, taken: int) -> Floats:
    """Return the cost by number of slots, if `taken` slots are in use."""
    shifted = np.full(len(cost), np.inf)
    if taken < len(cost):
        shifted[taken:] = cost[: len(cost) - taken]
    return shifted


def _to_slots(block: Block, slot_bytes: int, constant_bytes: int) -> Block:
    """Return the block with sizes in slots, rounded up."""

    def slots(nbytes: int) -> int:
        return max(0, -(-nbytes // slot_bytes))

    return Block(
        block.time_s,
        slots(block.kept),
        slots(block.output),
        slots(block.forward_peak - constant_bytes),
        slots(block.peak - constant_bytes),
    )
