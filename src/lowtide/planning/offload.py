"""When offloaded values leave memory in forward, and how long ops wait for that.

A value is put after its producer has run. The put and the background write slow down ops slightly. The store writes
one value after another, in the order of the puts, while ops run. A value leaves memory when it is written and no op
will read it any more. Ops wait for a write only where more than `limit_bytes` would be live, and at the end of forward,
so that no write continues in backward. A compressed value is compressed right after its producer, and the original
leaves memory after its last reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .problem import Problem


@dataclass(frozen=True)
class OffloadTimes:
    """Effects of offloading on forward."""

    ends: dict[int, int]
    """By offloaded value: the last op during which it is in memory."""
    written_before: dict[int, int]
    """By offloaded op: the op before which all its outputs are written or compressed; the number of ops: before
    backward."""
    wait_s: float
    """Time that forward waits for writes, loses to them and spends on compression."""


@dataclass
class _Writes:
    """The background writes of one forward pass, and their clock."""

    now_s: float = 0.0
    idle_at_s: float = 0.0
    """End of the last write."""
    wait_s: float = 0.0
    pending: list[tuple[int, float]] = field(default_factory=list)
    """Values that are still in memory, with the end of their write."""

    def delay(self, seconds: float) -> None:
        """Add time by which forward is longer."""
        self.now_s += seconds
        self.wait_s += seconds

    def wait_until(self, end_s: float) -> None:
        """Wait for the end of a write."""
        self.wait_s += max(0.0, end_s - self.now_s)
        self.now_s = max(self.now_s, end_s)


def offload_times(
    problem: Problem,
    values: Sequence[int],
    live_bytes: Sequence[int],
    *,
    limit_bytes: int,
    written_before: Mapping[int, int] | None = None,
) -> OffloadTimes:
    """Simulate offloading `values`, while `live_bytes` are live at each op without them.

    With `written_before`, ops wait exactly where it says; else where more than `limit_bytes` would be live.
    """
    n = problem.n_ops
    put_before: list[list[int]] = [[] for _ in range(n + 1)]
    for v in values:
        put_before[min([problem.producer[v] + 1, *problem.consumers[v][:1]])].append(v)
    ends: dict[int, int] = {}
    deadlines: dict[int, int] = {}
    writes = _Writes()
    for i in range(n + 1):
        for v in put_before[i]:
            codec_cost = problem.codec_cost[v]
            if codec_cost is not None:
                writes.delay(codec_cost.compression_s(problem.nbytes[v]))
                ends[v] = problem.natural_end[v]
                deadlines[problem.producer[v]] = problem.producer[v] + 1
                continue
            link = problem.link
            assert link is not None
            writes.delay(link.put_slowdown_s(problem.nbytes[v]))
            writes.idle_at_s = max(writes.idle_at_s, writes.now_s) + link.write_s(problem.nbytes[v])
            writes.pending.append((v, writes.idle_at_s))
        # Values that an op still reads are part of `live_bytes`.
        waiting_bytes = sum(problem.nbytes[v] for v, _ in writes.pending if problem.natural_end[v] < i)
        still_pending = []
        for v, end_s in writes.pending:
            producer = problem.producer[v]
            unread = problem.natural_end[v] < i
            if written_before is not None:
                leaves = i >= written_before[producer]
            else:
                too_full = i == n or live_bytes[i] + waiting_bytes > limit_bytes
                leaves = producer in deadlines or (unread and (end_s <= writes.now_s or too_full))
            if not leaves:
                still_pending.append((v, end_s))
                continue
            writes.wait_until(end_s)
            deadlines.setdefault(producer, i)
            ends[v] = max(i - 1, problem.natural_end[v])
            if unread:
                waiting_bytes -= problem.nbytes[v]
        writes.pending = still_pending
        if i < n:
            writes.now_s += problem.time_s[i]
    return OffloadTimes(ends, deadlines, writes.wait_s)
