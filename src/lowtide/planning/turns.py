"""Turns: from which ask on what an op makes, when it is made again, rests in memory, and from which on it does not.

Without turns that is the same all through backward: what is recomputed rests until nobody wants it any more, or, of an
op in `again`, is let go of at once. Near the smallest budgets neither will do: memory is short for a while, and what
did not fit then has room later. At each of its turns an op changes from one to the other.

A solver counts in asks. The engine does not see all of them (what is kept is asked for behind its back), so a turn
waits for the next ask of something that is recomputed; and a plan, which knows no trace, says of which op that is, and
which of its asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .bits import bits_of, members_of
from .problem import Problem

Turns = Mapping[int, Sequence[int]]
"""By op: the asks with which it changes, in order."""
NO_TURNS: Turns = {}


class Turn(NamedTuple):
    """One change, as the engine knows it."""

    op: int
    asked: int
    """It comes when backward asks for what this op has made,"""
    time: int
    """the how manieth time, from 0."""


def is_seen(problem: Problem, keep: Sequence[int | bool], ask: int) -> bool:
    """Whether the engine is asked, or something kept or from outside is simply there."""
    maker = problem.maker[problem.ask_value[ask]]
    return maker >= 0 and not keep[maker]


def settled(problem: Problem, keep: Sequence[int | bool], turns: Turns) -> dict[int, tuple[int, ...]]:
    """The turns at the asks with which they really come, without those of ops that are kept."""
    if not turns:
        return {}
    following: list[int] = [problem.n_asks] * (problem.n_asks + 1)  # by ask: the next one that is seen
    for k in range(problem.n_asks - 1, -1, -1):
        following[k] = k if is_seen(problem, keep, k) else following[k + 1]
    found = {}
    for op, asks in turns.items():
        changes: set[int] = set()
        for k in asks:
            changes ^= {following[k]}
        changes.discard(problem.n_asks)
        if changes and not keep[op]:
            found[op] = tuple(sorted(changes))
    return found


def by_ask(turns: Turns) -> dict[int, list[int]]:
    """The same by ask: which ops change."""
    found: dict[int, list[int]] = {}
    for op, asks in turns.items():
        for k in asks:
            found.setdefault(k, []).append(op)
    return found


def as_bits(turns: Turns) -> dict[int, int]:
    """The same by ask, as sets (`bits`)."""
    return {k: bits_of(ops) for k, ops in by_ask(turns).items()}


def from_bits(turns: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """By op again."""
    found: dict[int, tuple[int, ...]] = {}
    for k in sorted(turns):
        for op in members_of(turns[k]):
            found[op] = (*found.get(op, ()), k)
    return found


def to_plan(problem: Problem, turns: Turns) -> tuple[Turn, ...]:
    """As a plan has them; they are settled."""
    return tuple(
        Turn(op, problem.maker[problem.ask_value[k]], _asks_before(problem, k))
        for op, asks in sorted(turns.items())
        for k in asks
    )


def from_plan(problem: Problem, turns: Iterable[Turn]) -> dict[int, tuple[int, ...]]:
    """As a solver has them; what the trace does not ask for never comes."""
    places = {}
    for k in range(problem.n_asks):
        places[problem.maker[problem.ask_value[k]], _asks_before(problem, k)] = k
    found: dict[int, list[int]] = {}
    for turn in turns:
        if (turn.asked, turn.time) in places:
            found.setdefault(turn.op, []).append(places[turn.asked, turn.time])
    return {op: tuple(sorted(asks)) for op, asks in found.items()}


def _asks_before(problem: Problem, ask: int) -> int:
    """How often the same op's values have been asked for by then."""
    maker = problem.maker[problem.ask_value[ask]]
    return sum(problem.maker[problem.ask_value[k]] == maker for k in range(ask))
