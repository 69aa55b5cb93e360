"""When values come back from a store in backward: as they are needed, or read ahead of that, while backward goes on.

What is read ahead takes its memory from the moment its reading begins. That is a moment the engine knows for certain:
when backward begins, or when another op's values are first fetched. One value is read after another, in the order in
which that was begun, which takes a little of the time of what runs beside it; backward waits only for what is not there
yet. What is not read ahead is waited for from beginning to end. What is packed is not concerned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..records.plan import WHEN_BACKWARD_BEGINS
from .problem import Problem

_CAUTION = 1.5
"""Reads are begun as early as if they took this much longer, where there is room: a disk is not always as quick."""


@dataclass(frozen=True)
class Fetch:
    """Backward fetches a value from the store."""

    value: int
    own_s: float
    """What backward has taken by then, without waiting for the store."""
    most_bytes: int
    """The most that has been alive since the fetch before."""


class PrefetchQueue:
    """The reads of one backward pass, and the clock by which they go."""

    def __init__(self, problem: Problem, away: Sequence[int], prefetch_after: Mapping[int, int]) -> None:
        self._problem = problem
        self._now_s = 0.0
        self._idle_s = 0.0  # when all that was begun is read
        self._read_by: dict[int, float] = {}
        self._due: dict[int, list[int]] = {}
        # What was made last is needed first.
        for v in sorted(away, key=lambda v: (-problem.producer[v], v)) if prefetch_after else ():
            if problem.producer[v] in prefetch_after and problem.codec_cost[v] is None:
                self._due.setdefault(prefetch_after[problem.producer[v]], []).append(v)

    def goes_on(self, seconds: float) -> None:
        """Backward does something else meanwhile."""
        self._now_s += seconds

    def due_after(self, event: int) -> list[int]:
        """The values to be read now that this op's values are first fetched, or that backward begins."""
        return self._due.pop(event, [])

    def begin(self, value: int) -> float:
        """A value is read from now on: how much longer what runs beside that takes."""
        link, nbytes = self._problem.link, self._problem.nbytes[value]
        assert link is not None
        self._now_s += link.prefetch_slowdown_s(nbytes)
        self._idle_s = self._read_by[value] = max(self._idle_s, self._now_s) + link.prefetch_read_s(nbytes)
        return link.prefetch_slowdown_s(nbytes)

    def fetch(self, value: int) -> float:
        """A value is needed: how long backward waits for it."""
        link = self._problem.link
        assert link is not None
        read_by = self._read_by.pop(value, None)
        if read_by is None:
            waits_s = link.blocking_fetch_s(self._problem.nbytes[value])
        else:
            waits_s = max(0.0, read_by - self._now_s)
        self._now_s += waits_s
        return waits_s

    def is_begun(self, value: int) -> bool:
        """Whether the memory of a value is there, though it has not been fetched."""
        return value in self._read_by

    def forget(self, value: int) -> None:
        """Nobody wants it any more."""
        self._read_by.pop(value, None)


def choose_prefetches(
    problem: Problem, away: Collection[int], fetches: Sequence[Fetch], *, last_live_bytes: int, limit_bytes: int
) -> dict[int, int]:
    """By op whose values are to be read ahead: the op after whose first fetch, or `WHEN_BACKWARD_BEGINS`.

    `fetches`: all of a backward pass that reads nothing ahead; `last_live_bytes` are alive before it. Each op gets the
    last moment from which on its values can be read in time; or the first from which on there is room for them, if that
    is later; or none.
    """
    link = problem.link
    if link is None or not fetches:
        return {}
    fetched: dict[int, list[int]] = {}  # by op, in the order of their first fetches: all its fetches
    for i, fetch in enumerate(fetches):
        fetched.setdefault(problem.producer[fetch.value], []).append(i)
    first_of = {some[0]: op for op, some in fetched.items()}
    unread = {problem.producer[v] for v in {*away} - {fetch.value for fetch in fetches}}
    # What may still be read ahead, by fetch: until then, since the one before.
    free = [min(limit_bytes - fetch.most_bytes, link.max_prefetch_bytes) for fetch in fetches]
    free[0] = min(free[0], limit_bytes - last_live_bytes)
    sizes = [problem.nbytes[fetch.value] for fetch in fetches]
    begin_by: dict[int, float] = {}
    soonest = float("inf")
    for op, some in reversed(fetched.items()):
        reading_s = sum(link.prefetch_read_s(sizes[i]) for i in some)
        soonest = begin_by[op] = min(soonest, fetches[some[0]].own_s) - _CAUTION * reading_s
    chosen: dict[int, int] = {}
    for op, some in fetched.items():
        if op in unread or not all(link.prefetch_pays(sizes[i]) for i in some):
            continue
        first, last = some[0], some[-1]
        # From the first fetch on only those are ahead that come later.
        later = {i: sum(sizes[k] for k in some if k >= i) for i in range(first + 1, last + 1)}
        if any(free[i] < nbytes for i, nbytes in later.items()):
            continue
        nbytes = sum(sizes[i] for i in some)
        begin = first  # the fetch up to which the memory is there
        found: tuple[int, int] | None = None
        while free[begin] >= nbytes:
            begin -= 1
            if begin < 0:
                found = WHEN_BACKWARD_BEGINS, begin
                break
            if begin in first_of:
                found = first_of[begin], begin
                if fetches[begin].own_s <= begin_by[op]:
                    break
        if found is None:
            continue
        chosen[op], begun = found
        for i in range(begun + 1, first + 1):
            free[i] -= nbytes
        for i, rest in later.items():
            free[i] -= rest
    return chosen
