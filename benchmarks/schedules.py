"""Schedules for chains beside those of the peers: time to make and go through one, and forward steps.

    python -m benchmarks.schedules [--rounds N] [--skip-slow]

Peers are optional: pip install checkpoint_schedules pyrevolve. All variants of a problem are run in turn,
round by round, and minima are compared, because the machine may be shared. `checkpoint_schedules` remembers
what it has computed, so it is imported afresh for each run, outside the time that counts. What is
timed is the same for all: make the schedule, and go through all of its actions.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy

import lowtide
from lowtide.chain.schedules import Advance, Reverse, Store, mixed, multistage, online, revolve

PEERS = ("checkpoint_schedules", "pyrevolve")
LONG, SHORT = 10_000, 1000
WRITE_COST = READ_COST = 2.0  # the defaults of checkpoint_schedules
TIERS = ((4, 4), (10, 10), (5, 50))


@dataclass
class Run:
    """One way of solving one problem."""

    name: str
    make: Callable[[Any], Iterable[Any]]
    """From the peer's module, or from None."""
    count: Callable[[Iterable[Any]], str]
    peer: str | None = None


def count_ours(actions: Iterable[Any]) -> str:
    steps = 0
    for action in actions:
        if isinstance(action, Advance):
            steps += action.stop - action.start
        elif isinstance(action, Reverse):
            steps += action.source == "state"
        elif isinstance(action, Store):
            steps += action.what == "tape"
    return f"{steps:,}"


def count_peer(actions: Iterable[Any]) -> str:
    """Forward steps of a `checkpoint_schedules` schedule."""
    return f"{sum(action.n1 - action.n0 for action in actions if type(action).__name__ == 'Forward'):,}"


def count_peer_tiers(schedule: Iterable[Any]) -> str:
    """The same, with what lies on disk at one time: until its last use, and until it is moved away."""
    actions = list(schedule)
    written: dict[int, int] = {}
    spans: dict[int, tuple[int, int]] = {}
    held = most_held = 0
    for position, action in enumerate(actions):
        kind = type(action).__name__
        if kind == "Forward" and action.write_ics and action.storage.name == "DISK":
            written[action.n0] = position
            spans[position] = (position, position)
            held += 1
        elif kind in ("Copy", "Move") and action.from_storage.name == "DISK":
            spans[written[action.n]] = (written[action.n], position)
            held -= kind == "Move"
        most_held = max(most_held, held)
    needed = max((sum(a <= start <= b for a, b in spans.values()) for start in spans), default=0)
    return f"{count_peer(actions)}, on disk {needed} in use, {most_held} held"


def count_tiers(schedule: Any) -> str:
    return f"{count_ours(schedule)}, on disk {schedule.peak_slots.disk} held, cost {schedule.cost:g}"


def fresh(peer: str | None) -> Any:
    """The peer's module, without what it remembers from earlier calls."""
    if peer is None:
        return None
    if peer == "checkpoint_schedules":
        for name in [name for name in sys.modules if name.split(".")[0] == peer]:
            del sys.modules[name]
    return importlib.import_module(peer)


def pyrevolve_actions(module: Any, n: int, slots: int) -> Iterable[tuple[Any, int]]:
    """The bare C++ scheduler of pyrevolve, without the classes around it: (action, steps)."""
    scheduler, action = module.CRevolve(slots, n), module.Action
    while (now := scheduler.revolve()) != action.terminate:
        if now == action.error:
            raise RuntimeError("pyrevolve's scheduler reports an error")
        yield now, scheduler.capo - scheduler.oldcapo if now == action.advance else 0


def count_pyrevolve(actions: Iterable[tuple[Any, int]]) -> str:
    reverses = ("firstrun", "youturn")
    return f"{sum(steps + (action.name in reverses) for action, steps in actions):,}"


def problems(skip_slow: bool) -> dict[str, list[Run]]:
    """Every problem with the ways of solving it, ours first."""
    table: dict[str, list[Run]] = {}
    peer = "checkpoint_schedules"
    for slots in (5, 10, 50):
        table[f"binomial, n={LONG}, {slots} slots"] = [
            Run("lowtide revolve", lambda _, s=slots: revolve(LONG, s), count_ours),
            Run(
                "checkpoint_schedules Multistage",
                lambda module, s=slots: module.MultistageCheckpointSchedule(LONG, s, 0),
                count_peer,
                peer,
            ),
            Run(
                "pyrevolve CRevolve (C++)",
                lambda module, s=slots: pyrevolve_actions(module, LONG, s),
                count_pyrevolve,
                "pyrevolve",
            ),
            Run("lowtide online", lambda _, s=slots: online(s).replay(LONG), count_ours),
        ]
    for slots in (5, 10) if skip_slow else (5, 10, 50):
        table[f"mixed, n={SHORT}, {slots} slots"] = [
            Run("lowtide mixed", lambda _, s=slots: mixed(SHORT, s), count_ours),
            Run(
                "checkpoint_schedules Mixed",
                lambda module, s=slots: module.MixedCheckpointSchedule(SHORT, s),
                count_peer,
                peer,
            ),
        ]
    for memory, disk in TIERS[:2] if skip_slow else TIERS:
        table[f"two tiers, n={SHORT}, {memory} in memory, {disk} on disk"] = [
            Run(
                "lowtide multistage",
                lambda _, m=memory, d=disk: multistage(SHORT, m, d, WRITE_COST, READ_COST),
                count_tiers,
            ),
            Run(
                "checkpoint_schedules HRevolve",
                lambda module, m=memory, d=disk: module.HRevolve(SHORT, m, d, wd=WRITE_COST, rd=READ_COST),
                count_peer_tiers,
                peer,
            ),
        ]
    table[f"mixed, n={LONG}, 50 slots"] = [Run("lowtide mixed", lambda _: mixed(LONG, 50), count_ours)]
    return table


def timed(run: Run) -> float:
    """Seconds for making the schedule and going through it, without the import of a peer."""
    module = fresh(run.peer)
    gc.collect()
    start = time.perf_counter()
    for _ in run.make(module):
        pass
    return time.perf_counter() - start


def report(rounds: int, skip_slow: bool) -> None:
    missing = [peer for peer in PEERS if importlib.util.find_spec(peer) is None]
    versions = ", ".join(f"{peer} {importlib.metadata.version(peer)}" for peer in PEERS if peer not in missing)
    print(f"lowtide {lowtide.__version__}; {versions or 'no peers'}")
    print(
        f"Python {platform.python_version()}, NumPy {numpy.__version__}, {platform.machine()}, "
        f"{platform.system()}, {os.cpu_count()} cores, one thread, minima of {rounds} rounds"
    )
    if missing:
        print(f"not installed, so not compared: pip install {' '.join(missing)}")
    for title, runs in problems(skip_slow).items():
        present = [run for run in runs if run.peer not in missing]
        best = dict.fromkeys((run.name for run in present), float("inf"))
        for round_number in range(rounds):
            for run in present:
                # What takes seconds varies little: once is enough.
                if round_number < 1 or best[run.name] < 1.0:
                    best[run.name] = min(best[run.name], timed(run))
        ours = best[present[0].name]
        print(f"\n{title}")
        for run in present:
            counted = run.count(run.make(fresh(run.peer)))
            ratio = "" if run is present[0] else f"× {best[run.name] / ours:.2f}"
            print(f"  {run.name:34} {best[run.name] * 1e3:10.1f} ms  {ratio:>9}  steps {counted}")


def report_streaming() -> None:
    n, slots = 1_000_000, 20
    start = time.perf_counter()
    actions = sum(1 for _ in revolve(n, slots))
    seconds = time.perf_counter() - start
    tracemalloc.start()
    for _ in revolve(n, slots):
        pass
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    schedule = revolve(n, slots)
    print(f"\nrevolve, n={n}, {slots} slots, streamed")
    print(
        f"  {actions:,} actions in {seconds:.2f} s, {schedule.forward_steps:,} steps, traced peak {peak_bytes:,} bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-slow", action="store_true", help="leave out what takes a peer many seconds")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # checkpoint_schedules mentions that numba is missing
    report(arguments.rounds, arguments.skip_slow)
    report_streaming()


if __name__ == "__main__":
    main()
