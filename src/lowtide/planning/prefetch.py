"""When offloaded values are fetched in backward: prefetched in the background, or when they are needed.

A prefetch starts at an event that the engine observes: when backward begins, or when another op's outputs are first
fetched. The memory of a value is live from this event. The store reads one value after another, in the order in which
the prefetches were started, which slows down backward slightly. Backward waits only for the rest of a read. If a value
was not prefetched, backward waits for the whole read. Compressed values are not fetched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..records.link import Link
from ..records.plan import WHEN_BACKWARD_BEGINS
from .problem import Problem

_READ_TIME_MARGIN = 1.5
"""Factor on read times when the start of a prefetch is chosen, because disk speed varies. Doubled: prefetches start
earlier and take memory for longer."""


@dataclass(frozen=True)
class Fetch:
    """One fetch of a backward pass."""

    value: int
    busy_s: float
    """Time of backward so far, without waiting for the store."""
    peak_bytes: int
    """Most live bytes since the previous fetch."""


class PrefetchQueue:
    """The background reads of one backward pass, and their clock."""

    def __init__(self, problem: Problem, offloaded: Sequence[int], prefetch_after: Mapping[int, int]) -> None:
        self._problem = problem
        self._now_s = 0.0
        self._idle_at_s = 0.0  # end of the last read that was started
        self._read_at_s: dict[int, float] = {}  # by prefetched value that is not yet fetched: end of its read
        self._due: dict[int, list[int]] = {}  # by event
        # Backward needs the values that were produced last first.
        for v in sorted(offloaded, key=lambda v: (-problem.producer[v], v)) if prefetch_after else ():
            if problem.producer[v] in prefetch_after and problem.codec_cost[v] is None:
                self._due.setdefault(prefetch_after[problem.producer[v]], []).append(v)

    def advance(self, seconds: float) -> None:
        """Add time in which backward computes."""
        self._now_s += seconds

    def due_after(self, event: int) -> list[int]:
        """Return the values to prefetch after an event: the op that was fetched, or `WHEN_BACKWARD_BEGINS`."""
        return self._due.pop(event, [])

    def start(self, value: int) -> float:
        """Start a prefetch. Return the seconds by which it slows down backward."""
        link, nbytes = self._problem.link, self._problem.nbytes[value]
        assert link is not None
        self._now_s += link.prefetch_slowdown_s(nbytes)
        self._idle_at_s = self._read_at_s[value] = max(self._idle_at_s, self._now_s) + link.prefetch_read_s(nbytes)
        return link.prefetch_slowdown_s(nbytes)

    def fetch(self, value: int) -> float:
        """Fetch a value. Return the seconds that backward waits."""
        link = self._problem.link
        assert link is not None
        read_at_s = self._read_at_s.pop(value, None)
        if read_at_s is None:
            wait_s = link.blocking_fetch_s(self._problem.nbytes[value])
        else:
            wait_s = max(0.0, read_at_s - self._now_s)
        self._now_s += wait_s
        return wait_s

    def is_started(self, value: int) -> bool:
        """Return whether a prefetch of the value has started, and the value is not yet fetched."""
        return value in self._read_at_s

    def cancel(self, value: int) -> None:
        """Cancel a prefetch. Its read still takes time."""
        self._read_at_s.pop(value, None)


def choose_prefetches(
    problem: Problem, offloaded: Collection[int], fetches: Sequence[Fetch], *, last_live_bytes: int, limit_bytes: int
) -> dict[int, int]:
    """Return for each op to prefetch the op after whose first fetch this starts, or `WHEN_BACKWARD_BEGINS`.

    `fetches` are those of a backward pass without prefetches, `last_live_bytes` the live bytes before it. Each op gets
    the latest event from which its reads end in time. If memory is too short for that, it gets the earliest event
    from which there is enough memory. If there is none, the op is not prefetched.
    """
    link = problem.link
    if link is None or not fetches:
        return {}
    schedule = _FetchSchedule(problem, link, fetches, last_live_bytes, limit_bytes)
    never_fetched = {problem.producer[v] for v in {*offloaded} - {fetch.value for fetch in fetches}}
    start_by_s = schedule.latest_starts()
    chosen: dict[int, int] = {}
    for op, indices in schedule.fetches_of.items():
        if op in never_fetched or not all(link.prefetch_pays(schedule.nbytes[i]) for i in indices):
            continue
        start = schedule.find_start(op, start_by_s[op])
        if start is not None:
            chosen[op] = WHEN_BACKWARD_BEGINS if start < 0 else schedule.op_first_fetched_at[start]
            schedule.reserve(op, start)
    return chosen


@dataclass
class _FetchSchedule:
    """The fetches of a backward pass, and the memory that is free for prefetches between them."""

    problem: Problem
    link: Link
    fetches: Sequence[Fetch]
    last_live_bytes: int
    limit_bytes: int
    nbytes: list[int] = field(init=False)
    """By fetch."""
    fetches_of: dict[int, list[int]] = field(init=False)
    """By op: the indices of its fetches. Ops are in the order of their first fetches."""
    op_first_fetched_at: dict[int, int] = field(init=False)
    """By index of a fetch that is the first one of an op: this op."""

    def __post_init__(self) -> None:
        self.nbytes = [self.problem.nbytes[fetch.value] for fetch in self.fetches]
        self.fetches_of = {}
        for i, fetch in enumerate(self.fetches):
            self.fetches_of.setdefault(self.problem.producer[fetch.value], []).append(i)
        self.op_first_fetched_at = {indices[0]: op for op, indices in self.fetches_of.items()}
        # By fetch: bytes that may be prefetched and live between the previous fetch and this one.
        max_bytes = self.link.max_prefetch_bytes
        self._free_bytes = [min(self.limit_bytes - fetch.peak_bytes, max_bytes) for fetch in self.fetches]
        self._free_bytes[0] = min(self._free_bytes[0], self.limit_bytes - self.last_live_bytes)

    def latest_starts(self) -> dict[int, float]:
        """Return by op the time (`busy_s`) at which its prefetch must start to end in time."""
        start_by_s: dict[int, float] = {}
        next_start_s = float("inf")  # reads follow each other, so a read must end before the next one starts
        for op, indices in reversed(self.fetches_of.items()):
            read_s = sum(self.link.prefetch_read_s(self.nbytes[i]) for i in indices)
            next_start_s = min(next_start_s, self.fetches[indices[0]].busy_s) - _READ_TIME_MARGIN * read_s
            start_by_s[op] = next_start_s
        return start_by_s

    def find_start(self, op: int, start_by_s: float) -> int | None:
        """Return the fetch after which to start the prefetch of `op`; -1: when backward begins; None: no memory."""
        if any(self._free_bytes[i] < waiting for i, waiting in self._bytes_after_first_fetch(op).items()):
            return None
        nbytes = sum(self.nbytes[i] for i in self.fetches_of[op])
        i = self.fetches_of[op][0]
        found: int | None = None
        while self._free_bytes[i] >= nbytes:  # the memory is free between fetch i - 1 and fetch i
            i -= 1
            if i < 0:
                return i
            if i in self.op_first_fetched_at:
                found = i
                if self.fetches[i].busy_s <= start_by_s:
                    break
        return found

    def reserve(self, op: int, start: int) -> None:
        """Reserve the memory for a prefetch of `op` that starts after the fetch `start`."""
        nbytes = sum(self.nbytes[i] for i in self.fetches_of[op])
        for i in range(start + 1, self.fetches_of[op][0] + 1):
            self._free_bytes[i] -= nbytes
        for i, waiting in self._bytes_after_first_fetch(op).items():
            self._free_bytes[i] -= waiting

    def _bytes_after_first_fetch(self, op: int) -> dict[int, int]:
        """Return by fetch, from the first of `op` to its last: bytes of `op` prefetched and not yet fetched."""
        indices = self.fetches_of[op]
        return {i: sum(self.nbytes[k] for k in indices if k >= i) for i in range(indices[0] + 1, indices[-1] + 1)}
