"""When values that wait elsewhere leave memory in forward, and how long ops have to wait for that.

Handing a value over, and writing it beside the ops, takes a little of their time. One value is written after another,
in the order in which they are put, while ops go on. A value leaves once it is written and nobody reads it any more.
Ops wait only where too many bytes would be alive otherwise, and at the end of forward, so that nothing is on its way
in backward. What is packed is packed at once, and leaves as soon as nobody reads it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .problem import Problem


@dataclass(frozen=True)
class OffloadTimes:
    """What writing does to forward."""

    ends: dict[int, int]
    """By value: the last op while which it is in memory."""
    written_before: dict[int, int]
    """By op that made them: the op before which all its values are written (the number of ops: before backward)."""
    store_wait_s: float
    """For writes and what they take from the ops, and for packing."""


def offload_times(
    problem: Problem,
    values: Sequence[int],
    live_bytes: Sequence[int],
    *,
    limit_bytes: int,
    written_before: Mapping[int, int] | None = None,
) -> OffloadTimes:
    """Follow the writes of `values`, beside which `live_bytes` are alive at each op.

    With `written_before` ops wait just when it says; else where more than `limit_bytes` would be alive.
    """
    link = problem.link
    n = problem.n_ops
    put_at: list[list[int]] = [[] for _ in range(n + 1)]
    for v in values:
        put_at[min([problem.producer[v] + 1, *problem.consumers[v][:1]])].append(v)
    ends: dict[int, int] = {}
    due: dict[int, int] = {}
    on_the_way: list[tuple[int, float]] = []  # value, when it is written
    clock = written = store_wait_s = 0.0
    for i in range(n + 1):
        for v in put_at[i]:
            codec_cost = problem.codec_cost[v]
            if codec_cost is not None:
                packing_s = codec_cost.compression_s(problem.nbytes[v])
                clock += packing_s
                store_wait_s += packing_s
                ends[v] = problem.natural_end[v]
                due[problem.producer[v]] = problem.producer[v] + 1
                continue
            assert link is not None
            slowed_s = link.put_slowdown_s(problem.nbytes[v])
            clock += slowed_s
            store_wait_s += slowed_s
            written = max(written, clock) + link.write_s(problem.nbytes[v])
            on_the_way.append((v, written))
        if on_the_way:
            # Whoever still reads a value holds it: those are among `live_bytes`.
            lingering = sum(problem.nbytes[v] for v, _ in on_the_way if problem.natural_end[v] < i)
            staying = []
            for v, at in on_the_way:
                producer = problem.producer[v]
                if written_before is not None:
                    is_due = i >= written_before[producer]
                else:
                    crowded = i == n or live_bytes[i] + lingering > limit_bytes
                    is_due = producer in due or (problem.natural_end[v] < i and (at <= clock or crowded))
                if not is_due:
                    staying.append((v, at))
                    continue
                store_wait_s += max(0.0, at - clock)
                clock = max(clock, at)
                due.setdefault(producer, i)
                ends[v] = max(i - 1, problem.natural_end[v])
                if problem.natural_end[v] < i:
                    lingering -= problem.nbytes[v]
            on_the_way = staying
        if i < n:
            clock += problem.time_s[i]
    return OffloadTimes(ends, due, store_wait_s)
