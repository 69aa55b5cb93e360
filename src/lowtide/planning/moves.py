"""Random small changes of a plan, for annealing.

Decisions change by group. Ops that overwrite each other's memory form a group, because they are mostly kept or
recomputed together. Groups of few bytes do not change. Some moves change several groups at once, because changing
them one after the other would lead through much worse plans: exchange the decisions of two groups, change a run of
groups, or change the same place in several repeated blocks.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from .problem import Problem
from .repetition import find_repeated_blocks

_MIN_SHARE = 0.002
"""Share of the budget below which a group does not change. Doubled: fewer groups, so fewer moves."""
_SINGLE_OP_PROBABILITY = 0.15
"""Probability that a move changes a single op of a group instead of all."""
_GROUPS_PER_MOVE = (1, 1, 2, 2, 3)
_RUN_LENGTHS = (2, 3, 4, 6)

KEEP, RETAIN, RELEASE = range(3)
"""Decisions for an op: keep it, or recompute it and retain or release its outputs."""


@dataclass
class Decisions:
    """Two sets of ops (`bits`): the kept ones, and the released ones among the others."""

    keep: int
    released: int

    def copy(self) -> Decisions:
        """Return a copy."""
        return Decisions(self.keep, self.released)

    def of(self, op: int) -> int:
        """Return the decision for an op: `KEEP`, `RETAIN` or `RELEASE`."""
        return KEEP if self.keep >> op & 1 else RELEASE if self.released >> op & 1 else RETAIN

    def decide(self, op: int, decision: int) -> None:
        """Set the decision for an op."""
        bit = 1 << op
        self.keep = self.keep | bit if decision == KEEP else self.keep & ~bit
        self.released = self.released | bit if decision == RELEASE else self.released & ~bit

    def make_effective(self, problem: Problem) -> None:
        """Change the decisions to those that the engine would execute."""
        self.keep = problem.effective_bits(self.keep)
        self.released &= ~self.keep


class Moves:
    """Random changes of the decisions for one problem. Pinned ops and the ops in `fixed` do not change."""

    def __init__(self, problem: Problem, budget_bytes: int, fixed: Collection[int] = ()) -> None:
        first = list(range(problem.n_ops))  # by op: the first op of its group
        free = [not pinned and j not in fixed for j, pinned in enumerate(problem.pinned)]
        for j in range(problem.n_ops):
            for i in problem.overwritten_producers[j]:
                if i >= 0 and free[i] and free[j]:
                    first[j] = first[i]
        groups: dict[int, list[int]] = {}
        for j in range(problem.n_ops):
            if free[j]:
                groups.setdefault(first[j], []).append(j)
        self.groups = [ops for ops in groups.values() if _max_output_bytes(problem, ops) >= _MIN_SHARE * budget_bytes]
        """The ops of each group."""
        group_of = {j: g for g, ops in enumerate(self.groups) for j in ops}
        self._neighbours = [_neighbours(problem, ops, group_of) for ops in self.groups]
        self._repeated = _repeated_groups(problem, group_of)
        self._kinds = [
            self._change_some,
            self._exchange_neighbours,
            self._exchange_any,
            self._change_run,
            self._change_repeated,
        ]
        self._weights = [4, 3, 1, 1, 4 if self._repeated else 0]

    def change(self, decisions: Decisions, rng: random.Random) -> None:
        """Make one random move."""
        rng.choices(self._kinds, self._weights)[0](decisions, rng)

    def _change_some(self, decisions: Decisions, rng: random.Random) -> None:
        for _ in range(rng.choice(_GROUPS_PER_MOVE)):
            self._change_group(decisions, rng.randrange(len(self.groups)), rng)

    def _exchange_neighbours(self, decisions: Decisions, rng: random.Random) -> None:
        """Exchange the decisions of two groups of which one reads outputs of the other."""
        group = rng.randrange(len(self.groups))
        if self._neighbours[group]:
            self._exchange(decisions, group, rng.choice(self._neighbours[group]), rng)

    def _exchange_any(self, decisions: Decisions, rng: random.Random) -> None:
        self._exchange(decisions, rng.randrange(len(self.groups)), rng.randrange(len(self.groups)), rng)

    def _change_run(self, decisions: Decisions, rng: random.Random) -> None:
        """In a run of groups, retain or release all that is recomputed, or recompute and retain everything."""
        start, length = rng.randrange(len(self.groups)), rng.choice(_RUN_LENGTHS)
        decision, also_kept = rng.choice(((RETAIN, False), (RELEASE, False), (RETAIN, True)))
        for group in range(start, min(start + length, len(self.groups))):
            if also_kept or self._decision(decisions, group) != KEEP:
                self._decide(decisions, group, decision, rng)

    def _change_repeated(self, decisions: Decisions, rng: random.Random) -> None:
        """Give the same place in some consecutive blocks the same decision."""
        groups = rng.choice(self._repeated)
        start, decision = rng.randrange(len(groups)), rng.choice((KEEP, RETAIN, RELEASE))
        for group in groups[start : start + rng.randint(1, len(groups))]:
            self._decide(decisions, group, decision, rng)

    def _exchange(self, decisions: Decisions, one: int, other: int, rng: random.Random) -> None:
        """Exchange the decisions of two groups. If they are equal, change the first group."""
        old = self._decision(decisions, one), self._decision(decisions, other)
        if old[0] == old[1]:
            self._change_group(decisions, one, rng)
        else:
            self._decide(decisions, one, old[1], rng)
            self._decide(decisions, other, old[0], rng)

    def _change_group(self, decisions: Decisions, group: int, rng: random.Random) -> None:
        self._decide(decisions, group, (self._decision(decisions, group) + rng.choice((1, 2))) % 3, rng)

    def _decision(self, decisions: Decisions, group: int) -> int:
        return decisions.of(self.groups[group][-1])

    def _decide(self, decisions: Decisions, group: int, decision: int, rng: random.Random) -> None:
        ops = self.groups[group]
        if len(ops) > 1 and rng.random() < _SINGLE_OP_PROBABILITY:
            ops = [rng.choice(ops)]
        for j in ops:
            decisions.decide(j, decision)


def _max_output_bytes(problem: Problem, ops: list[int]) -> int:
    return max(sum(problem.nbytes[v] for v in problem.outputs[j]) for j in ops)


def _neighbours(problem: Problem, ops: list[int], group_of: dict[int, int]) -> list[int]:
    """Return the groups that read outputs of these ops or produce their inputs."""
    readers = [reader for j in ops for v in problem.outputs[j] for reader in problem.consumers[v]]
    producers = [problem.producer[u] for j in ops for u in problem.inputs[j]]
    own = group_of[ops[0]]
    return sorted({group_of[i] for i in (*readers, *producers) if i in group_of} - {own})


def _repeated_groups(problem: Problem, group_of: dict[int, int]) -> list[list[int]]:
    """Return for each place in a repeated block the groups at this place, block by block."""
    found: list[list[int]] = []
    for repeat in find_repeated_blocks(problem):
        for offset in range(repeat.period):
            ops = range(repeat.start + offset, repeat.start + repeat.blocks * repeat.period, repeat.period)
            groups = list(dict.fromkeys(group_of[j] for j in ops if j in group_of))
            if len(groups) > 1 and groups not in found:
                found.append(groups)
    return found
