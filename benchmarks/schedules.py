"""Compare lowtide's schedules with other packages: planning time and forward steps.

    python -m benchmarks.schedules [--rounds N] [--skip-slow]

The other packages are optional: pip install checkpoint_schedules pyrevolve. The timed work is to create a
schedule and to iterate over its actions. All variants of a problem run in turn, and the minimum over all
rounds is compared, so that load on the machine matters little. `checkpoint_schedules` caches its results, so
it is imported again before each run, outside the timed part.
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
    """One schedule for one problem."""

    name: str
    make: Callable[[Any], Iterable[Any]]
    """Create the schedule. The argument is the module of the other package, None for lowtide."""
    count: Callable[[Iterable[Any]], str]
    peer: str | None = None


def count_lowtide(actions: Iterable[Any]) -> str:
    """Return the forward steps of a lowtide schedule."""
    steps = 0
    for action in actions:
        if isinstance(action, Advance):
            steps += action.stop - action.start
        elif isinstance(action, Reverse):
            steps += action.source == "state"
        elif isinstance(action, Store):
            steps += action.content == "tape"
    return f"{steps:,}"


def count_peer(actions: Iterable[Any]) -> str:
    """Return the forward steps of a `checkpoint_schedules` schedule."""
    return f"{sum(action.n1 - action.n0 for action in actions if type(action).__name__ == 'Forward'):,}"


def count_peer_tiers(schedule: Iterable[Any]) -> str:
    """Return forward steps, and peak states on disk: until their last use, and until they are moved."""
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


def count_lowtide_tiers(schedule: Any) -> str:
    """Return forward steps, peak states on disk and cost of a lowtide schedule."""
    return f"{count_lowtide(schedule)}, on disk {schedule.peak_slots.disk} held, cost {schedule.cost:g}"


def import_uncached(peer: str | None) -> Any:
    """Return the module of another package, without cached results of earlier calls."""
    if peer is None:
        return None
    if peer == "checkpoint_schedules":
        for name in [name for name in sys.modules if name.split(".")[0] == peer]:
            del sys.modules[name]
    return importlib.import_module(peer)


def pyrevolve_actions(module: Any, n: int, slots: int) -> Iterable[tuple[Any, int]]:
    """Yield (action, steps) from the C++ scheduler of pyrevolve, without its Python classes."""
    scheduler, action = module.CRevolve(slots, n), module.Action
    while (now := scheduler.revolve()) != action.terminate:
        if now == action.error:
            raise RuntimeError("pyrevolve's scheduler reports an error")
        yield now, scheduler.capo - scheduler.oldcapo if now == action.advance else 0


def count_pyrevolve(actions: Iterable[tuple[Any, int]]) -> str:
    """Return the forward steps of a pyrevolve schedule."""
    reverses = ("firstrun", "youturn")
    return f"{sum(steps + (action.name in reverses) for action, steps in actions):,}"


def problems(skip_slow: bool) -> dict[str, list[Run]]:
    """Return the schedules to compare for each problem, lowtide first."""
    table: dict[str, list[Run]] = {}
    peer = "checkpoint_schedules"
    for slots in (5, 10, 50):
        table[f"binomial, n={LONG}, {slots} slots"] = [
            Run("lowtide revolve", lambda _, s=slots: revolve(LONG, s), count_lowtide),
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
            Run("lowtide online", lambda _, s=slots: online(s).replay(LONG), count_lowtide),
        ]
    for slots in (5, 10) if skip_slow else (5, 10, 50):
        table[f"mixed, n={SHORT}, {slots} slots"] = [
            Run("lowtide mixed", lambda _, s=slots: mixed(SHORT, s), count_lowtide),
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
                count_lowtide_tiers,
            ),
            Run(
                "checkpoint_schedules HRevolve",
                lambda module, m=memory, d=disk: module.HRevolve(SHORT, m, d, wd=WRITE_COST, rd=READ_COST),
                count_peer_tiers,
                peer,
            ),
        ]
    table[f"mixed, n={LONG}, 50 slots"] = [Run("lowtide mixed", lambda _: mixed(LONG, 50), count_lowtide)]
    return table


def timed(run: Run) -> float:
    """Return the seconds to create the schedule and iterate over it, without the import of a package."""
    module = import_uncached(run.peer)
    gc.collect()
    start = time.perf_counter()
    for _ in run.make(module):
        pass
    return time.perf_counter() - start


def report(rounds: int, skip_slow: bool) -> None:
    """Print time and forward steps of every schedule."""
    missing = [peer for peer in PEERS if importlib.util.find_spec(peer) is None]
    versions = ", ".join(f"{peer} {importlib.metadata.version(peer)}" for peer in PEERS if peer not in missing)
    print(f"lowtide {lowtide.__version__}; {versions or 'no other package'}")
    print(
        f"Python {platform.python_version()}, NumPy {numpy.__version__}, {platform.machine()}, "
        f"{platform.system()}, {os.cpu_count()} cores, one thread, minima of {rounds} rounds"
    )
    if missing:
        print(f"not installed and not compared: {', '.join(missing)}. Run: pip install {' '.join(missing)}")
    for title, runs in problems(skip_slow).items():
        present = [run for run in runs if run.peer not in missing]
        best = dict.fromkeys((run.name for run in present), float("inf"))
        for round_number in range(rounds):
            for run in present:
                # Times above a second vary little: one round is enough.
                if round_number < 1 or best[run.name] < 1.0:
                    best[run.name] = min(best[run.name], timed(run))
        lowtide_seconds = best[present[0].name]
        print(f"\n{title}")
        for run in present:
            counted = run.count(run.make(import_uncached(run.peer)))
            ratio = "" if run is present[0] else f"× {best[run.name] / lowtide_seconds:.2f}"
            print(f"  {run.name:34} {best[run.name] * 1e3:10.1f} ms  {ratio:>9}  steps {counted}")


def report_streaming() -> None:
    """Print time and traced memory of iterating over a million steps."""
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
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all schedules (default 5)")
    parser.add_argument("--skip-slow", action="store_true", help="skip problems that take another package many seconds")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", RuntimeWarning)  # checkpoint_schedules warns that numba is not installed
    report(arguments.rounds, arguments.skip_slow)
    report_streaming()


if __name__ == "__main__":
    main()
