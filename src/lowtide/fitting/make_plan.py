"""Make a plan for the next step of a fitted model."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..codecs import Codec
from ..codecs.costs import codec_costs_for
from ..engine.runtime import current_runtime
from ..planning import Link, Plan, solve
from ..planning.solve import Effort
from ..records import Trace
from ..stores import Store

log = logging.getLogger("lowtide")

_DEADLINE_S = 20.0
MARGIN = 200
"""A plan leaves 1/200 of the limit free if possible, the accuracy of simulated bytes. Doubled: less margin."""


def shift(trace: Trace, nbytes: int) -> Trace:
    """Return the same step with `nbytes` more other bytes at all times."""
    if not nbytes:
        return trace
    return replace(
        trace,
        events=tuple(replace(event, other_bytes=max(0, event.other_bytes + nbytes)) for event in trace.events),
        peak_bytes=max(0, trace.peak_bytes + nbytes),
    )


def solve_with_margin(
    trace: Trace,
    limit_bytes: int,
    say: Callable[[str], None],
    store: Store | None = None,
    codecs: Sequence[Codec] = (),
    effort: Effort | None = None,
) -> Plan:
    """Return a plan that leaves a small part of the limit free, or else one that does not."""
    return solve(
        trace,
        limit_bytes,
        link=link_to(store),
        codec_costs=codec_costs_for(trace, codecs),
        leave_free_bytes=limit_bytes // MARGIN,
        deadline_s=_DEADLINE_S,
        effort=effort,
        progress=say,
    )


def link_to(store: Store | None) -> Link | None:
    """Return the measured speed of a store, or None if there is none or it cannot be written."""
    if store is None:
        return None
    memory = current_runtime().memory()
    pace = memory.pace_of(store)
    if pace is None or store.stats().fallbacks:
        return None
    costs = memory.transfer_costs_of(store)
    if costs is None:
        return None
    in_bytes_per_s = min(pace.speed.in_bytes_per_s, costs.fetch_bytes_per_s)
    return Link(
        store.tier,
        pace.speed.out_bytes_per_s,
        in_bytes_per_s,
        put_s=costs.put_s,
        put_s_per_byte=costs.put_s_per_byte,
        fetch_s=costs.fetch_s,
        prefetch_bytes_per_s=min(in_bytes_per_s, costs.prefetch_bytes_per_s),
        prefetch_s_each=costs.prefetch_s_each,
        prefetch_s_per_byte=costs.prefetch_s_per_byte,
        max_prefetch_bytes=store.max_prefetch_bytes,
    )


def link_named(name: str) -> Link | None:
    """Return the link to the store of this name, such as "disk"."""
    return link_to(current_runtime().store(name))


@contextlib.contextmanager
def planning_progress() -> Any:
    """Show progress if planning takes over a second: a spinner on a terminal, lines in the log otherwise."""
    started = time.perf_counter()
    status: list[Any] = []

    def say(sentence: str) -> None:
        log.info("planning: %s", sentence)
        if sys.stderr.isatty() and time.perf_counter() - started > 1:
            if not status:
                from rich.console import Console

                status.append(Console(stderr=True).status(""))
                status[0].start()
            status[0].update(f"lowtide: planning: {sentence}")

    try:
        yield say
    finally:
        for one in status:
            one.stop()
