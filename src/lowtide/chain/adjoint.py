"""`grad`: the adjoint of a long chain of steps, within a number of slots or a byte budget.

`grad` chooses a schedule, runs the forward and the reverse sweep with the user's functions, and returns the
adjoint of the initial state with a report. If steps are deterministic and the store is exact, the result is
bit-equal to storing every state. Memory that a step allocates internally is not measured: declare it as
`scratch`.
"""

from __future__ import annotations

import contextlib
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
    """Return the adjoint of the initial state of a chain of `n` steps, and a report of the run.

    - `step(state, i)` returns x_{i+1} from x_i. `adjoint_step(state, adjoint, i)` returns the adjoint of x_i
      from x_i and the adjoint of x_{i+1}. Both may write into their arguments.
    - `adjoint` is the adjoint of the final state, or a function from the final state to its adjoint. With a
      `budget`, this function is first called with the initial state, to measure the size of its result.
    - Pass one of `slots`, `budget` and `schedule`. `slots` is the number of states that may be stored, beside
      the working state; the initial state takes one slot. `budget` is the bytes for slots, working state,
      its successor, adjoints and `scratch`, the memory that a step allocates internally. `schedule` is one of
      `lowtide.chain.schedules`.
    - With `n=None`, the chain ends at the first x_i, i ≥ 1, for which `stop(x_i, i)` is true.
    - `store` holds the slots, for example in narrow precision or on disk. It must not evict. A mapping gives
      one store for each tier of the schedule.
    - With `tape_step(state, i) -> (state, tape)` and `adjoint_tape(tape, adjoint, i)`, a slot may hold the
      data to reverse one step, which takes fewer steps (`schedules.mixed`).
    - `check_determinism` compares every recomputed state with the first one, by a digest of 8 bytes per step.
      The digests count towards the budget unless n is None.

    >>> import numpy as np
    >>> x0 = np.array([0.5])
    >>> lam, report = grad(lambda x, i: x * x, lambda x, lam, i: 2 * x * lam, x0, 3, adjoint=np.ones(1), slots=1)
    >>> lam == 8 * x0**7, report.forward_steps
    (array([ True]), 6)
    """
    functions = Functions(step, adjoint_step, tape_step, adjoint_tape)
    _check_options(functions, slots, budget, schedule)
    n = _chain_length(n, stop, schedule)
    if n == 0:
        empty = GradReport(0, "nothing", 0, 0, 0, 0, None, {}, {}, 0.0, 0.0, 0.0)
        return copy(adjoint(copy(state)) if callable(adjoint) else adjoint), empty

    budget_bytes = None if budget is None else parse_bytes(budget)
    scratch_bytes = 0 if scratch is None else parse_bytes(scratch)
    stores = _stores_by_tier(store, check_determinism)
    with contextlib.ExitStack() as own_stores:
        if "memory" not in stores:
            stores["memory"] = own_stores.enter_context(ActivationStore(evict="error"))
        if schedule is None:
            fixed_bytes = scratch_bytes + (DIGEST_BYTES * (n or 0) if check_determinism else 0)
            if slots is None:
                memory = SweepMemory.measure(functions, state, adjoint, stores["memory"])
                slots = memory.slots(n, budget_bytes, stores["memory"], fixed_bytes)
            schedule = _choose_schedule(n, slots, tape_step)
        if "disk" not in stores and schedule.peak_slots.disk:
            stores["disk"] = own_stores.enter_context(ActivationStore(evict="error", tier="disk"))
        with Progress(progress, None if n is None else schedule.forward_steps) as progress_display:
            executor = Executor(
                functions,
                state,
                n,
                adjoint,
                stores,
                budget_bytes=budget_bytes,
                scratch_bytes=scratch_bytes,
                check_determinism=check_determinism,
                progress=progress_display,
            )
            _execute(executor, schedule, stop)
        return executor.adjoint, _report(executor, schedule, budget_bytes)


def _check_options(functions: Functions, slots: Any, budget: Any, schedule: Schedule | None) -> None:
    if (functions.tape_step is None) != (functions.adjoint_tape is None):
        raise ArgumentError("tape_step= and adjoint_tape= belong together: pass both or neither")
    if slots is not None and (not isinstance(slots, int) or isinstance(slots, bool) or slots < 1):
        raise ArgumentError(f"slots is the number of states that may be stored, an int ≥ 1, not {slots!r}")
    if sum(choice is not None for choice in (slots, budget, schedule)) > 1:
        raise ArgumentError("slots=, budget= and schedule= exclude each other: pass one of them")


def _chain_length(n: int | None, stop: Stop | None, schedule: Schedule | None) -> int | None:
    """Return the number of steps, or None if `stop` decides."""
    online = isinstance(schedule, Online)
    scheduled_n = None if schedule is None or online else schedule.n
    if n is None and stop is None:
        n = scheduled_n
        if n is None:
            raise ArgumentError("n=None needs stop=: pass a function stop(x_i, i) that is true at the end of the chain")
    if n is not None and stop is not None:
        raise ArgumentError("n and stop= exclude each other: pass n=None to end the chain by stop=")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 0):
        raise ArgumentError(f"n is the number of steps, an int ≥ 0, not {n!r}")
    if online and n is not None:
        raise ArgumentError("an online schedule is for chains of unknown length: pass n=None and stop=")
    if schedule is not None and scheduled_n != n:
        raise ArgumentError(f"the schedule {schedule.name} is for n={scheduled_n}, but n={n} was passed")
    return n


def _stores_by_tier(store: Stores | None, check_determinism: bool) -> dict[str, ActivationStore]:
    """Return the user's store for each tier. Raise `ArgumentError` for stores that would lose or change states."""
    stores = {"memory": store} if isinstance(store, ActivationStore) else dict(store or {})
    for tier, one in stores.items():
        if tier not in ("memory", "disk"):
            raise ArgumentError(f"store= has a tier {tier!r}: the tiers of schedules are 'memory' and 'disk'")
        if one.evict != "error" and (one.budget_bytes is not None or one.slots is not None):
            raise ArgumentError(
                f"the store for {tier} may evict ({one.evict!r}) a state that the schedule needs later: "
                "create it with evict='error'"
            )
        if check_determinism and one.precision != "exact":
            raise ArgumentError(
                f"check_determinism compares bits, but the store for {tier} rounds to {one.precision}: "
                "use precision='exact'"
            )
    return stores


def _choose_schedule(n: int | None, slots: int, tape_step: Any) -> Schedule:
    if n is None:
        return schedules.online(slots)
    slots = min(slots, max(n - 1, 1))
    return schedules.revolve(n, slots) if tape_step is None else schedules.mixed(n, slots)


def _execute(executor: Executor, schedule: Schedule, stop: Stop | None) -> None:
    try:
        if isinstance(schedule, Online) and stop is not None:
            _execute_online(executor, schedule, stop)
        else:
            executor.run_all(schedule)
    finally:
        executor.release_all()


def _execute_online(executor: Executor, schedule: Online, stop: Stop) -> None:
    for action in schedule.forward():
        executor.run(action)
        if isinstance(action, Advance) and _is_end(stop, executor.state, action.stop):
            executor.start_adjoint(schedule.finish())
            executor.progress.expect(schedule.forward_steps)
    executor.run_all(schedule.reverse())


def _is_end(stop: Stop, state: Any, i: int) -> bool:
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
