"""A plan for the step that comes: the profiled one, with what lies beside it now."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .._errors import StoreError
from ..codecs import Codec
from ..engine.offloading import pace_of
from ..planning import Link, Plan, solve
from ..profiling.packings import packings_for
from ..profiling.tiers import Trips, measure_trips
from ..stores import Store
from ..stores.names import resolve
from ..trace import Trace

log = logging.getLogger("lowtide")

_DEADLINE_S = 20.0
CAUTION = 200
"""A plan leaves 1/200 of the limit free where it can: simulated bytes are right to about that."""


def shift(trace: Trace, nbytes: int) -> Trace:
    """The same step with so many more bytes alive beside it, all the time."""
    if not nbytes:
        return trace
    return replace(
        trace,
        ops=tuple(replace(op, other_bytes=max(0, op.other_bytes + nbytes)) for op in trace.ops),
        asks=tuple(replace(ask, other_bytes=max(0, ask.other_bytes + nbytes)) for ask in trace.asks),
        peak_bytes=max(0, trace.peak_bytes + nbytes),
    )


def solve_with_caution(
    trace: Trace,
    limit_bytes: int,
    say: Callable[[str], None],
    store: Store | None = None,
    codecs: Sequence[Codec] = (),
) -> Plan:
    """A plan that leaves a little of the limit free, or, if there is none, one that does not."""
    return solve(
        trace,
        limit_bytes,
        link=link_to(store),
        packings=packings_for(trace, codecs),
        leave_free_bytes=limit_bytes // CAUTION,
        deadline_s=_DEADLINE_S,
        progress=say,
    )


def link_to(store: Store | None) -> Link | None:
    """How fast a store is; None where there is none, or it cannot be written."""
    pace = pace_of(store) if store is not None else None
    if store is None or pace is None or store.stats().fallbacks:
        return None
    trips = _trips.get(store)
    if trips is None:
        try:
            trips = _trips[store] = measure_trips(store)
        except StoreError:
            if store.closed:
                raise
            return None  # it has said so itself
    in_bytes_per_s = min(pace.speed.in_bytes_per_s, trips.fetch_bytes_per_s)
    return Link(
        store.tier,
        pace.speed.out_bytes_per_s,
        in_bytes_per_s,
        put_s=trips.put_s,
        put_s_per_byte=trips.put_s_per_byte,
        fetch_s=trips.fetch_s,
        ahead_bytes_per_s=min(in_bytes_per_s, trips.ahead_bytes_per_s),
        ahead_s_each=trips.ahead_s_each,
        ahead_s_per_byte=trips.ahead_s_per_byte,
        max_ahead_bytes=store.max_ahead_bytes,
    )


_trips: weakref.WeakKeyDictionary[Store, Trips] = weakref.WeakKeyDictionary()


def link_named(name: str) -> Link | None:
    """The link to the store of this name: "disk"."""
    return link_to(resolve(name))


@contextlib.contextmanager
def planning_progress() -> Any:
    """Say what the planner is at, if it takes over a second: a spinner on a terminal, lines in the log elsewhere."""
    started = time.perf_counter()
    status: list[Any] = []

    def say(sentence: str) -> None:
        log.info("planning: %s", sentence)
        if sys.stderr.isatty() and time.perf_counter() - started > 1:
            if not status:
                from rich.console import Console

                status.append(Console(stderr=True).status(""))
                status[0].start()
            status[0].update(f"lowtide plans: {sentence}")

    try:
        yield say
    finally:
        for one in status:
            one.stop()
