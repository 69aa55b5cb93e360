"""Small changes of a plan, for searches that try them at random.

Decisions are changed by group: ops that write over each other's memory are kept or made again together, mostly, and
ops of few bytes are left alone. Besides changing a few of them there are changes that take several at once, where one
after the other would have to go through much worse plans: what is kept moves on to the next op, two change places, a
run of ops is no longer retained, or what is alike in repeated blocks is treated alike.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from .problem import Problem
from .repetition import find_repeated_blocks

_SMALL = 0.002
"""Share of the budget below which the bytes of an op are not worth deciding about."""
_ALONE = 0.15
"""How often one op of a group is changed, rather than all of them."""
_AT_ONCE = (1, 1, 2, 2, 3)
_RUN = (2, 3, 4, 6)

KEPT, ONCE, AGAIN = range(3)


@dataclass
class Decisions:
    """Sets of ops (`bits`): those that are kept; of the others, those that are made again more than once."""

    keep: int
    released: int

    def copy(self) -> Decisions:
        """To be changed."""
        return Decisions(self.keep, self.released)

    def state(self, op: int) -> int:
        """What is decided."""
        return KEPT if self.keep >> op & 1 else AGAIN if self.released >> op & 1 else ONCE

    def decide(self, op: int, state: int) -> None:
        """Decide otherwise, for all of backward."""
        one = 1 << op
        self.keep = self.keep | one if state == KEPT else self.keep & ~one
        self.released = self.released | one if state == AGAIN else self.released & ~one

    def obey(self, problem: Problem) -> None:
        """Decide as the engine would obey it."""
        self.keep = problem.effective_bits(self.keep)
        self.released &= ~self.keep


class Moves:
    """Changes of decisions for one problem; what is pinned stays kept, and so do the ops in `fixed`."""

    def __init__(self, problem: Problem, budget_bytes: int, fixed: Collection[int] = ()) -> None:
        first = list(range(problem.n_ops))  # by op: the first of its group
        free = [not pinned and j not in fixed for j, pinned in enumerate(problem.pinned)]
        for j in range(problem.n_ops):
            for i in problem.over[j]:
                if i >= 0 and free[i] and free[j]:
                    first[j] = first[i]
        groups: dict[int, list[int]] = {}
        for j in range(problem.n_ops):
            if free[j]:
                groups.setdefault(first[j], []).append(j)
        self.groups = [ops for ops in groups.values() if _bytes_of(problem, ops) >= _SMALL * budget_bytes]
        group_of = {j: g for g, ops in enumerate(self.groups) for j in ops}
        self._near = [_near(problem, ops, group_of) for ops in self.groups]
        self._alike = _alike(problem, group_of)
        kinds = [self._change_some, self._exchange_near, self._exchange_any, self._change_run]
        self._kinds, self._weights = (
            [*kinds, self._change_alike],
            [4, 3, 1, 1, 4 if self._alike else 0],
        )

    def change(self, decisions: Decisions, draw: random.Random) -> None:
        """One change."""
        draw.choices(self._kinds, self._weights)[0](decisions, draw)

    def _change_some(self, decisions: Decisions, draw: random.Random) -> None:
        for _ in range(draw.choice(_AT_ONCE)):
            self._flip(decisions, draw.randrange(len(self.groups)), draw)

    def _exchange_near(self, decisions: Decisions, draw: random.Random) -> None:
        """With one that reads what it makes, or makes what it reads."""
        group = draw.randrange(len(self.groups))
        if self._near[group]:
            self._exchange(decisions, group, draw.choice(self._near[group]), draw)

    def _exchange_any(self, decisions: Decisions, draw: random.Random) -> None:
        self._exchange(decisions, draw.randrange(len(self.groups)), draw.randrange(len(self.groups)), draw)

    def _change_run(self, decisions: Decisions, draw: random.Random) -> None:
        """What is recomputed in a run of groups is retained, or is not; or it is all recomputed."""
        start, length = draw.randrange(len(self.groups)), draw.choice(_RUN)
        state, also_kept = draw.choice(((ONCE, False), (AGAIN, False), (ONCE, True)))
        for group in range(start, min(start + length, len(self.groups))):
            if also_kept or self._state(decisions, group) != KEPT:
                self._decide(decisions, group, state, draw)

    def _change_alike(self, decisions: Decisions, draw: random.Random) -> None:
        """The same place in some blocks that follow each other."""
        alike = draw.choice(self._alike)
        start, state = draw.randrange(len(alike)), draw.choice((KEPT, ONCE, AGAIN))
        for group in alike[start : start + draw.randint(1, len(alike))]:
            self._decide(decisions, group, state, draw)

    def _exchange(self, decisions: Decisions, one: int, other: int, draw: random.Random) -> None:
        states = self._state(decisions, one), self._state(decisions, other)
        if states[0] == states[1]:
            self._flip(decisions, one, draw)
        else:
            self._decide(decisions, one, states[1], draw)
            self._decide(decisions, other, states[0], draw)

    def _flip(self, decisions: Decisions, group: int, draw: random.Random) -> None:
        self._decide(decisions, group, (self._state(decisions, group) + draw.choice((1, 2))) % 3, draw)

    def _state(self, decisions: Decisions, group: int) -> int:
        return decisions.state(self.groups[group][-1])

    def _decide(self, decisions: Decisions, group: int, state: int, draw: random.Random) -> None:
        ops = self.groups[group]
        if len(ops) > 1 and draw.random() < _ALONE:
            ops = [draw.choice(ops)]
        for j in ops:
            decisions.decide(j, state)


def _bytes_of(problem: Problem, ops: list[int]) -> int:
    return max(sum(problem.nbytes[v] for v in problem.outputs[j]) for j in ops)


def _near(problem: Problem, ops: list[int], group_of: dict[int, int]) -> list[int]:
    """The groups that read what these ops make, or make what these read."""
    readers = [w for j in ops for v in problem.outputs[j] for w in problem.consumers[v]]
    makers = [problem.producer[u] for j in ops for u in problem.inputs[j]]
    own = group_of[ops[0]]
    return sorted({group_of[i] for i in (*readers, *makers) if i in group_of} - {own})


def _alike(problem: Problem, group_of: dict[int, int]) -> list[list[int]]:
    """For each place in a repeated block: the groups at it, block by block."""
    found: list[list[int]] = []
    for repeat in find_repeated_blocks(problem):
        for offset in range(repeat.period):
            places = range(repeat.start + offset, repeat.start + repeat.blocks * repeat.period, repeat.period)
            groups = list(dict.fromkeys(group_of[j] for j in places if j in group_of))
            if len(groups) > 1 and groups not in found:
                found.append(groups)
    return found
