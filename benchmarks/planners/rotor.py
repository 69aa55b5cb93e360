"""rotor: the best persistent schedule for a chain of blocks. A baseline, and a start for `solve` where memory is short.

After Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains" (2019).
The first block of a part of the chain is either kept whole, or some blocks are run with nothing held but what enters
and what leaves them; the blocks after these are reversed first, then these, by the same rule. Among the schedules
that hold a checkpoint until it has been used, on sizes rounded up to slots, the programme finds the quickest.

What is exact when our engine follows it: all of a schedule that runs no block more than twice, which is what the
programme chooses unless memory is very short. Kept blocks, checkpoints of forward and segments of several blocks are
then as in rotor. What is approximated: decisions of an engine hold for a whole step and cannot say "hold this the
third time". A block that is run three times or more is not retained at any replay, so that each of its saved values
is made from the last checkpoint when it is asked for, where rotor would make all of them at once; and a checkpoint
that is set during a replay is held from the first replay that makes it. What is not a chain is not rotor's: values
that are read beyond the next block are always kept, as are those of pinned ops.

rotor's memory is coarser than the simulator's, which has the last word: of all schedules of the programme, for
budgets a little above the one asked for and downwards, the quickest that fits is taken.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lowtide.planning.candidate import Candidate, judged
from lowtide.planning.problem import Problem
from lowtide.planning.repetition import find_repeated_blocks
from lowtide.planning.rows import Floats
from lowtide.planning.segments import block_cuts, crossing_bytes, layers_of
from lowtide.planning.simulator import Bytes, Simulator

_SLOTS = 300
_SURPLUS = 1.15
"""Rounding up makes the programme careful: schedules for this much more than the budget may fit as well."""
_NEIGHBOURS = 8
_BASE = 0
"""A choice of the programme: keep the first block whole. Otherwise it is the block before which a checkpoint is set."""


@dataclass(frozen=True)
class Block:
    """A block as rotor sees it. Sizes are in any one unit, and do not count what entered the block."""

    time_s: float
    kept: int
    """What it holds for backward if it is kept whole, what leaves it included."""
    boundary: int
    """What leaves it."""
    passing: int
    """The most that is there while it runs and nothing is held."""
    peak: int
    """The most that is there while it is run, held whole, and reversed."""


class Programme:
    """The quickest way to reverse each part of a chain, with each number of slots up to `slots`."""

    def __init__(self, blocks: Sequence[Block], slots: int) -> None:
        n = self.n = len(blocks)
        self.blocks = blocks
        self.slots = slots
        self._cost: dict[tuple[int, int], Floats] = {}
        self._choice: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        clock = np.concatenate([[0.0], np.cumsum([block.time_s for block in blocks])])
        memory_budget = np.arange(slots + 1)
        for length in range(1, n + 1):
            for first in range(n - length + 1):
                last = first + length - 1
                block = blocks[first]
                best = np.full(slots + 1, np.inf)
                choice = np.full(slots + 1, _BASE, dtype=np.int64)
                if length == 1:
                    best[block.peak :] = block.time_s
                else:
                    best = block.time_s + _with_less(self._cost[first + 1, last], block.kept)
                    best[: block.peak] = np.inf
                passing = 0
                for cut in range(first + 1, last + 1):
                    before = blocks[cut - 1]
                    passing = max(passing, before.passing)
                    cost = _with_less(self._cost[cut, last], before.boundary) + self._cost[first, cut - 1]
                    cost += clock[cut] - clock[first]
                    better = (cost < best) & (memory_budget >= passing)
                    best[better] = cost[better]
                    choice[better] = cut
                self._cost[first, last] = best
                self._choice[first, last] = choice

    def time_s(self, slots: int) -> float:
        """Of all forward runs of blocks, the first ones included; infinite if there is no way."""
        return float(self._cost[0, self.n - 1][slots])

    def schedule(self, slots: int) -> Schedule:
        """The way that takes that time."""
        found = Schedule()
        pending = [(0, self.n - 1, slots, False)]
        while pending:
            first, last, memory_budget, replaying = pending.pop()
            while first <= last:
                cut = int(self._choice[first, last][memory_budget])
                if cut == _BASE:
                    if not replaying:
                        found.kept.add(first)
                    memory_budget -= self.blocks[first].kept
                    first += 1
                    continue
                if replaying:
                    found.passed_again.update(range(first, cut))
                    found.retained.add(cut - 1)
                else:
                    found.checkpoints.add(cut - 1)
                pending.append((first, cut - 1, memory_budget, True))
                memory_budget -= self.blocks[cut - 1].boundary
                first = cut
        return found


@dataclass
class Schedule:
    """What rotor would do, by block."""

    kept: set[int] = field(default_factory=set)
    """Held whole from forward on."""
    checkpoints: set[int] = field(default_factory=set)
    """What leaves them is held from forward on."""
    retained: set[int] = field(default_factory=set)
    """What leaves them is held from a replay on."""
    passed_again: set[int] = field(default_factory=set)
    """Replayed more than once."""


def solve_rotor(simulator: Simulator, budget_bytes: int) -> Candidate | None:
    """The quickest of rotor's schedules that fits, judged; None where there are no blocks, or none fits."""
    chain = _Chain(simulator)
    if len(chain.cuts) < 2:
        return None
    least = min(min(block.peak, block.passing) for block in chain.blocks)
    limit_bytes = budget_bytes - least
    if limit_bytes <= 0:
        return None
    # What is always there takes no slots.
    slot_bytes = -(-limit_bytes // _SLOTS)
    programme = Programme([_in_slots(block, slot_bytes, least) for block in chain.blocks], int(_SLOTS * _SURPLUS))
    decided: list[tuple[tuple[bool, ...], frozenset[int]]] = []
    """Those of all schedules, from the least slots to the most."""
    for slots in range(programme.slots + 1):
        if programme.time_s(slots) < np.inf:
            decisions = chain.decisions(programme.schedule(slots))
            if not decided or decisions != decided[-1]:
                decided.append(decisions)
    return _quickest(simulator, decided, budget_bytes)


def _quickest(
    simulator: Simulator, decided: list[tuple[tuple[bool, ...], frozenset[int]]], budget_bytes: int
) -> Candidate | None:
    """By bisection the last that fits; and its neighbours, as the simulator's order is not quite the programme's."""
    found: dict[int, Candidate] = {}

    def fits(place: int) -> bool:
        one = judged(simulator, *decided[place], solver="rotor")
        if one is not None and one.peak_bytes <= budget_bytes:
            found[place] = one
        return place in found

    last = bisect.bisect_left(range(len(decided)), True, key=lambda place: not fits(place)) - 1
    for place in range(max(0, last - _NEIGHBOURS), min(len(decided), last + 1 + _NEIGHBOURS)):
        if place not in found:
            fits(place)
    return min(found.values(), key=lambda one: one.extra_s, default=None)


class _Chain:
    """A step as a chain of blocks, measured by the simulator."""

    def __init__(self, simulator: Simulator) -> None:
        self.problem = problem = simulator.problem
        self.cuts = _cuts(problem)
        self.n = len(self.cuts) + 1
        self.block_of = [bisect.bisect_left(self.cuts, j) for j in range(problem.n_ops)]
        self.always = problem.recompute_all()
        self.leaving: list[set[int]] = [set() for _ in range(self.n)]
        """By block: the values that the next one reads."""
        self._find_leaving()
        self.blocks = self._measured(simulator) if len(self.cuts) > 1 else []

    def _find_leaving(self) -> None:
        problem, block_of = self.problem, self.block_of
        for v in range(problem.n_values):
            producer = problem.producer[v]
            if producer < 0 or self.always[producer]:
                continue
            last = max((block_of[j] for j in problem.consumers[v]), default=-1)
            if last > block_of[producer] + 1:
                self.always[producer] = True
            elif last > block_of[producer]:
                self.leaving[block_of[producer]].add(v)

    def decisions(self, schedule: Schedule) -> tuple[tuple[bool, ...], frozenset[int]]:
        """For the engine: what is kept, and what is not retained when it is replayed as an intermediate."""
        producer = self.problem.producer
        keep = [always or self.block_of[j] in schedule.kept for j, always in enumerate(self.always)]
        for block in schedule.checkpoints:
            for v in self.leaving[block]:
                keep[producer[v]] = True
        retained = {producer[v] for block in schedule.retained for v in self.leaving[block]}
        released = {j for j, block in enumerate(self.block_of) if block in schedule.passed_again and not keep[j]}
        return tuple(keep), frozenset(released - retained)

    def _measured(self, simulator: Simulator) -> list[Block]:
        """Sizes from two simulations: all blocks kept, and a checkpoint before each of them."""
        problem, n = self.problem, self.n
        boundary, kept, time_s = [0] * n, [0] * n, [0.0] * n
        for j, block in enumerate(self.block_of):
            if self.always[j]:
                continue
            time_s[block] += problem.replay_overhead_s[j]
            for v in problem.outputs[j]:
                leaves = v in self.leaving[block]
                boundary[block] += problem.nbytes[v] if leaves else 0
                kept[block] += problem.nbytes[v] if leaves or problem.saved[v] else 0
        whole = simulator.run(problem.keep_all())
        each = Schedule(kept={n - 1}, checkpoints=set(range(n - 1)))
        replayed = simulator.run(self.decisions(each)[0])
        unpacks = self._blocks_of_asks()
        passing = self._most(replayed.forward_live, self.block_of, boundary)
        held = [self._most(whole.forward_live, self.block_of, kept), self._most(whole.unpack_live, unpacks, kept)]
        alone = self._most(replayed.unpack_live, unpacks, boundary)
        return [
            Block(time_s[i], kept[i], boundary[i], passing[i], max(held[0][i], held[1][i], alone[i])) for i in range(n)
        ]

    def _blocks_of_asks(self) -> list[int]:
        """By ask: the block that backward is in, told by the values of the chain that it has come down to."""
        problem = self.problem
        found, now = [], self.n - 1
        for v in problem.unpack_value:
            producer = problem.producer[v]
            if producer >= 0 and not self.always[producer]:
                # What leaves a block is also asked for by the one after it.
                now = min(now, self.block_of[producer] + (v in self.leaving[self.block_of[producer]]))
            found.append(now)
        return found

    def _most(self, live: Bytes, block_of: list[int], held: list[int]) -> list[int]:
        """By block: the most live bytes in it, without what the blocks before it hold."""
        before = np.concatenate([[0], np.cumsum(held)[:-1]])
        most = [0] * self.n
        for nbytes, block in zip(live.tolist(), block_of, strict=True):
            most[block] = max(most[block], int(nbytes - before[block]))
        return most


def _cuts(problem: Problem) -> list[int]:
    """The ops after which a block ends. What comes before a stack of blocks, and what after it, are blocks as well.

    Between layers where modules are named so, as long as it is no wider there than at the narrowest places.
    """
    repeats = find_repeated_blocks(problem)
    narrow = block_cuts(problem, repeats)
    crossing, layers = crossing_bytes(problem), layers_of(problem)
    # Layers may differ (experts are sent other tokens in each): what is narrow is then said by all places.
    widest = crossing[narrow].max() if narrow else float(np.median(crossing)) if len(crossing) else 0.0
    named = [j for j in range(problem.n_ops - 1) if layers[j] != layers[j + 1] and crossing[j] <= widest]
    if len(named) >= len(narrow):
        return named
    ends = {j - 1 for one in repeats for j in (one.start, one.start + one.blocks * one.period)}
    return sorted({*narrow, *ends} - {-1, problem.n_ops - 1})


def _with_less(cost: Floats, taken: int) -> Floats:
    """The cost by slots when so many of them are taken."""
    less = np.full(len(cost), np.inf)
    if taken < len(cost):
        less[taken:] = cost[: len(cost) - taken]
    return less


def _in_slots(block: Block, slot_bytes: int, least: int) -> Block:
    def slots(nbytes: int) -> int:
        return max(0, -(-nbytes // slot_bytes))

    return Block(
        block.time_s, slots(block.kept), slots(block.boundary), slots(block.passing - least), slots(block.peak - least)
    )
