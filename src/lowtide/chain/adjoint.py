"""`grad`: the adjoint of a long chain of steps, within slots or a byte budget.

It chooses a schedule, measures what fits, runs forward and reverse sweep with the user's functions, and
returns the adjoint of the initial state with a report. The result is that of storing every state, bit for
bit, as long as the steps are deterministic and the store is exact. What one step allocates inside is not
seen: declare it as `scratch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .._errors import ArgumentError
from .._units import parse_bytes
from . import schedules
from ._arrays import copy
from ._exception_notes import add_note
from ._executor import DIGEST_BYTES, Executor, Functions
from ._progress import Progress
from ._report import GradReport
from ._sweep_memory import SweepMemory
from .schedules import Advance, Schedule
from .schedules._online import Online
from .store import ActivationStore

Stop = Callable[[Any, int], bool]
Stores = ActivationStore | Mapping[str, ActivationStore]


def grad(
    step: Callable[[Any, int], Any],
    adjoint_step: Callable[[Any, Any, int], Any],
    state: Any,
    n: int | None,
    *,
    adjoint: Any,
    slots: int | None = None,
    budget: str | int | None = None,
    schedule: Schedule | None = None,
    store: Stores | None = None,
    stop: Stop | None = None,
    tape_step: Callable[[Any, int], tuple[Any, Any]] | None = None,
    adjoint_tape: Callable[[Any, Any, int], Any] | None = None,
    scratch: str | int | None = None,
    check_determinism: bool = False,
    progress: bool = False,
) -> tuple[Any, GradReport]:
    """The adjoint of the initial state of a chain of `n` steps, and a report of the run.

    - `step(state, i)` returns x_{i+1} from x_i; `adjoint_step(state, adjoint, i)` returns the adjoint of x_i
      from x_i and the adjoint of x_{i+1}. Both may write into their arguments.
    - `adjoint` is the adjoint of the final state, or a function that makes it from the final state (which
      with a `budget` is first called with the initial state, to learn how large it is).
    - One of: `slots`, how many states may be stored beside the working state (the initial state takes one);
      `budget`, the bytes for everything held: slots, working state, its successor, adjoints and `scratch`
      (what a step allocates for itself, if you count it); or a `schedule` from `lowtide.chain.schedules`.
    - `n=None` with `stop(x_i, i)`: the chain ends at the first x_i, i ≥ 1, for which it is true.
    - `store` holds the slots, for example narrow or on disk; it must not evict. A mapping gives one for each
      tier of the schedule.
    - `tape_step(state, i) -> (state, tape)` and `adjoint_tape(tape, adjoint, i)`: with them a slot may hold
      what reversing a step needs, which takes fewer steps (`schedules.mixed`).
    - `check_determinism` compares every recomputed state with the first one, by 8 bytes a step (part
      of the budget, unless n is None).

    >>> import numpy as np
    >>> x0 = np.array([0.5])
    >>> lam, report = grad(lambda x, i: x * x, lambda x, lam, i: 2 * x * lam, x0, 3, adjoint=np.ones(1), slots=1)
    >>> lam == 8 * x0**7, report.forward_steps
    (array([ True]), 6)
    """
    functions = Functions(step, adjoint_step, tape_step, adjoint_tape)
    if (tape_step is None) != (adjoint_tape is None):
        raise ArgumentError("tape_step= and adjoint_tape= belong together: pass both or neither")
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or slots < 1):
        raise ArgumentError(f"slots is how many states may be stored, an int ≥ 1, not {slots!r}")
    n = _length(n, stop, schedule)
    if sum(choice is not None for choice in (slots, budget, schedule)) > 1:
        raise ArgumentError("slots=, budget= and schedule= exclude each other: pass one of them")
    if n == 0:
        empty = GradReport(0, "nothing", 0, 0, 0, 0, None, {}, {}, 0.0, 0.0, 0.0)
        return copy(adjoint(copy(state)) if callable(adjoint) else adjoint), empty

    budget_bytes = None if budget is None else parse_bytes(budget)
    scratch_bytes = 0 if scratch is None else parse_bytes(scratch)
    stores = _given(store)
    if check_determinism and any(one.precision != "exact" for one in stores.values()):
        raise ArgumentError(
            "check_determinism compares bits, but this store rounds what it holds: use precision='exact'"
        )
    own: list[ActivationStore] = []
    if "memory" not in stores:
        stores["memory"] = ActivationStore(evict="error")
        own.append(stores["memory"])
    if schedule is None:
        fixed_bytes = scratch_bytes + (DIGEST_BYTES * (n or 0) if check_determinism else 0)
        if slots is None:
            memory = SweepMemory.measured(functions, state, adjoint, stores["memory"])
            slots = memory.slots(n, budget_bytes, stores["memory"], fixed_bytes)
        schedule = _chosen(n, slots, tape_step)
    if "disk" not in stores and schedule.peak_slots.disk:
        stores["disk"] = ActivationStore(evict="error", tier="disk")
        own.append(stores["disk"])
    try:
        with Progress(progress, None if n is None else schedule.forward_steps) as shown:
            executor = Executor(
                functions,
                state,
                n,
                adjoint,
                stores,
                budget_bytes=budget_bytes,
                scratch_bytes=scratch_bytes,
                check_determinism=check_determinism,
                progress=shown,
            )
            try:
                if isinstance(schedule, Online) and stop is not None:
                    _run_online(executor, schedule, stop)
                else:
                    executor.obey(schedule)
            finally:
                executor.empty()
        return executor.adjoint, _report(executor, schedule, budget_bytes)
    finally:
        for made_here in own:
            made_here.close()


def _length(n: int | None, stop: Stop | None, schedule: Schedule | None) -> int | None:
    """The number of steps; None where `stop` will tell."""
    online = isinstance(schedule, Online)
    known = None if schedule is None or online else schedule.n
    if n is None and stop is None:
        n = known
        if n is None:
            raise ArgumentError("n=None needs stop=, a function of x_i and i that says when the chain ends")
    if n is not None and stop is not None:
        raise ArgumentError("n and stop= exclude each other: pass n=None where stop decides")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 0):
        raise ArgumentError(f"n is the number of steps, an int ≥ 0, not {n!r}")
    if online and n is not None:
        raise ArgumentError("an online schedule is for chains of unknown length: pass n=None and stop=")
    if schedule is not None and known != n:
        raise ArgumentError(f"the schedule {schedule.name} is for n={known}, but n={n} was asked")
    return n


def _given(store: Stores | None) -> dict[str, ActivationStore]:
    """The user's store for each tier."""
    given = {"memory": store} if isinstance(store, ActivationStore) else dict(store or {})
    for tier, one in given.items():
        if tier not in ("memory", "disk"):
            raise ArgumentError(f"store= has a tier {tier!r}: the tiers of schedules are 'memory' and 'disk'")
        if one.evict != "error" and (one.budget_bytes is not None or one.slots is not None):
            raise ArgumentError(
                f"the store for {tier} may evict ({one.evict!r}) a state that the schedule counts on: "
                "make it with evict='error'"
            )
    return given


def _chosen(n: int | None, slots: int, tape_step: Any) -> Schedule:
    if n is None:
        return schedules.online(slots)
    slots = min(slots, max(n - 1, 1))
    return schedules.revolve(n, slots) if tape_step is None else schedules.mixed(n, slots)


def _run_online(executor: Executor, schedule: Online, stop: Stop) -> None:
    for action in schedule.forward():
        executor.run(action)
        if isinstance(action, Advance) and _ends(stop, executor.state, action.stop):
            executor.start_adjoint(schedule.finish())
            executor.progress.expect(schedule.forward_steps)
    executor.obey(schedule.reverse())


def _ends(stop: Stop, state: Any, i: int) -> bool:
    try:
        return stop(state, i)
    except Exception as error:
        add_note(error, f"in stop(x_{i}, {i})")
        raise


def _report(executor: Executor, schedule: Schedule, budget_bytes: int | None) -> GradReport:
    return GradReport(
        n=executor.n or 0,
        schedule=schedule.name,
        forward_steps=executor.forward_steps,
        predicted_forward_steps=schedule.forward_steps,
        step_calls=executor.step_calls,
        peak_bytes=executor.peak_bytes,
        budget_bytes=budget_bytes,
        peak_slots=executor.peak_slots,
        peak_stored_bytes=executor.peak_stored_bytes,
        forward_seconds=executor.forward_seconds,
        adjoint_seconds=executor.adjoint_seconds,
        io_seconds=executor.io_seconds,
    )
