"""The executor: runs the actions of a schedule with the user's functions, and counts steps, bytes and seconds.

The executor holds one working state, the adjoint and the stored slots. States are copied into and out of
slots, so steps may write into their arguments and reuse their output buffers. `release_all` removes every
slot of the run from the stores. The executor does not validate the schedule, but raises `ScheduleError` for
an action that cannot run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .._errors import ArgumentError, BudgetError, ReplayMismatchError, ScheduleError
from .._units import format_bytes
from ._arrays import copy, detach, digest, flatten, library, nbytes
from ._exception_notes import add_note
from ._progress import Progress
from .schedules import Action, Advance, Free, Load, Reverse, Store
from .store import ActivationStore

_RUN_IDS = itertools.count()
DIGEST_BYTES = 8


class Functions(NamedTuple):
    """The user's functions."""

    step: Callable[[Any, int], Any]
    adjoint_step: Callable[[Any, Any, int], Any]
    tape_step: Callable[[Any, int], tuple[Any, Any]] | None
    adjoint_tape: Callable[[Any, Any, int], Any] | None


class SlotKey(NamedTuple):
    """The store key of one slot. The run id makes keys unique in a store that several runs share."""

    run: int
    content: str
    step: int


class Executor:
    """One forward and reverse sweep. `adjoint` is the adjoint of the final state, or a function of this state."""

    def __init__(
        self,
        functions: Functions,
        state: Any,
        n: int | None,
        adjoint: Any,
        stores: Mapping[str, ActivationStore],
        *,
        budget_bytes: int | None,
        scratch_bytes: int,
        check_determinism: bool,
        progress: Progress,
    ) -> None:
        self.functions = functions
        self.n = n
        self.state = copy(state)
        self.state_index: int | None = 0
        """The working state is x_i with this i. None without a working state."""
        self._state_bytes = nbytes(state)
        self._state_may_be_shared = False  # a step may return a buffer that it overwrites in its next call
        self._torch = any(library(array) == "torch" for array in flatten(state)[0])
        self._final_adjoint = adjoint if callable(adjoint) else None  # None as soon as `adjoint` is known
        self.adjoint = None if callable(adjoint) else copy(adjoint)
        self._adjoint_bytes = nbytes(self.adjoint)
        self.stores = stores
        self._in_memory = {tier: store.tier == "memory" for tier, store in stores.items()}
        self.budget_bytes = budget_bytes
        self.scratch_bytes = scratch_bytes
        self.progress = progress
        self._run_id = next(_RUN_IDS)
        self._slots: dict[str, dict[SlotKey, int]] = {"memory": {}, "disk": {}}
        self._stored_bytes = {"memory": 0, "disk": 0}
        self._digests = bytearray() if check_determinism else None
        self._count_digests = n is not None  # with unknown n the budget cannot reserve bytes for digests
        self.peak_slots: dict[str, int] = {}
        self.peak_stored_bytes: dict[str, int] = {}
        self.peak_bytes = 0
        self.step_calls = self.forward_steps = 0
        self.forward_seconds = self.adjoint_seconds = self.io_seconds = 0.0

    # Actions

    def run_all(self, actions: Iterable[Action]) -> None:
        """Run the actions in order."""
        freed_early: Free | None = None
        for action, following in _with_next(actions):
            if freed_early is not None and action == freed_early:
                freed_early = None
                continue
            # A slot that is freed right after its last read is taken out of the store without a copy.
            last_use = isinstance(following, Free) and following == _matching_free(action, following)
            self.run(action, last_use=last_use)
            freed_early = following if last_use and isinstance(following, Free) else None

    def run(self, action: Action, *, last_use: bool = False) -> None:
        """Run one action. With `last_use`, free the slot that the action reads."""
        if isinstance(action, Advance):
            self._require_state(action.start, action)
            for i in range(action.start, action.stop):
                self._set_state(self._step(self.state, i), i + 1, may_be_shared=True)
        elif isinstance(action, Store):
            self._require_state(action.step, action)
            if action.content == "tape":
                self._store_tape(action.step, action.tier)
            else:
                self._put(action.tier, "state", action.step, self.state)
        elif isinstance(action, Load):
            self._set_state(None, None)  # release the old state before the new one is allocated
            self._set_state(self._get(action.tier, "state", action.step, last_use), action.step)
            self._update_peak()
        elif isinstance(action, Free):
            self._free(action.tier, self._key(action.content, action.step))
        elif isinstance(action, Reverse):
            self._reverse(action, last_use)

    def _set_state(self, state: Any, index: int | None, *, may_be_shared: bool = False) -> None:
        self.state, self.state_index, self._state_bytes = state, index, nbytes(state)
        self._state_may_be_shared = may_be_shared

    def _step(self, state: Any, i: int, *, counted: bool = True) -> Any:
        extra_bytes = 0 if state is self.state else self._state_bytes
        started = time.perf_counter()
        try:
            result = self.functions.step(state, i)
        except Exception as error:
            add_note(error, f"in step {i}{self._of_n()}, forward")
            raise
        self.forward_seconds += time.perf_counter() - started
        if self._torch:
            result = detach(result)
        self.step_calls += 1
        if counted:
            self.forward_steps += 1
            self.progress.step()
        self._check_digest(i + 1, result)
        self._update_peak(extra_bytes + nbytes(result))
        return result

    def _store_tape(self, i: int, tier: str) -> None:
        if self.functions.tape_step is None:
            raise ArgumentError("this schedule stores tapes: pass tape_step= and adjoint_tape= to grad")
        started = time.perf_counter()
        try:
            result, tape = self.functions.tape_step(self.state, i)
        except Exception as error:
            add_note(error, f"in step {i}{self._of_n()}, taped")
            raise
        self.forward_seconds += time.perf_counter() - started
        result = detach(result) if self._torch else result
        self.forward_steps += 1
        self.progress.step()
        self._check_digest(i + 1, result)
        self._update_peak(nbytes(result) + nbytes(tape))
        self._set_state(result, i + 1, may_be_shared=True)
        self._put(tier, "tape", i, tape, extra_bytes=nbytes(tape))

    def _reverse(self, action: Reverse, last_use: bool) -> None:
        i = action.step
        self.start_adjoint(i + 1)
        if action.source == "tape":
            tier = next((t for t in self._slots if self._key("tape", i) in self._slots[t]), None)
            if tier is None or self.functions.adjoint_tape is None:
                raise ScheduleError(f"{action}: the tape of step {i} is not stored")
            source = self._get(tier, "tape", i, last_use)
            function = self.functions.adjoint_tape
        else:
            self._require_state(i, action)
            self._make_state_private()
            source = self.state
            self._set_state(None, None)
            function = self.functions.adjoint_step
            self.forward_steps += 1
            self.progress.step()
        extra_bytes = nbytes(source) + self._adjoint_bytes
        started = time.perf_counter()
        try:
            self.adjoint = function(source, self.adjoint, i)
        except Exception as error:
            add_note(error, f"in step {i}{self._of_n()}, adjoint")
            raise
        self.adjoint_seconds += time.perf_counter() - started
        if self._torch:
            self.adjoint = detach(self.adjoint)
        self._adjoint_bytes = nbytes(self.adjoint)
        self._update_peak(extra_bytes)

    def start_adjoint(self, n: int) -> None:
        """Compute the adjoint of the final state x_n, unless it is known. The working state stays the same."""
        self.n = n if self.n is None else self.n
        if self._final_adjoint is None:
            return
        if self.state_index == n:
            final = self.state
        else:
            self._require_state(n - 1, Reverse(n - 1))
            last = self.state
            self._state_may_be_shared = True  # the step may write into `last`, and Reverse needs x_{n-1} again
            self._make_state_private()
            # Not counted: schedules count this step as part of Reverse(n - 1).
            final = self._step(last, n - 1, counted=False)
            del last
        started = time.perf_counter()
        try:
            adjoint = self._final_adjoint(final)
        except Exception as error:
            add_note(error, f"in the adjoint of the final state x_{n}")
            raise
        self.adjoint_seconds += time.perf_counter() - started
        self.adjoint = copy(adjoint)  # the function may return the state itself
        self._adjoint_bytes = nbytes(adjoint)
        self._final_adjoint = None
        self._update_peak(nbytes(adjoint) + (nbytes(final) if final is not self.state else 0))

    def _make_state_private(self) -> None:
        """Replace the working state by a copy if a step may still write into it."""
        if self._state_may_be_shared:
            self._update_peak(self._state_bytes)
            self._set_state(copy(self.state), self.state_index)

    # Slots

    def _key(self, content: str, step: int) -> SlotKey:
        return SlotKey(self._run_id, content, step)

    def _put(self, tier: str, content: str, step: int, value: Any, extra_bytes: int = 0) -> None:
        started = time.perf_counter()
        key, store = self._key(content, step), self.stores[tier]
        store.put(key, value)
        self.io_seconds += time.perf_counter() - started
        slots = self._slots[tier]
        slots[key] = store.entry(key).nbytes
        self._stored_bytes[tier] += slots[key]
        self.peak_slots[tier] = max(self.peak_slots.get(tier, 0), len(slots))
        self.peak_stored_bytes[tier] = max(self.peak_stored_bytes.get(tier, 0), self._stored_bytes[tier])
        self._update_peak(extra_bytes)

    def _get(self, tier: str, content: str, step: int, last_use: bool) -> Any:
        key, store = self._key(content, step), self.stores[tier]
        if key not in self._slots[tier]:
            raise ScheduleError(f"the schedule loads the {content} of step {step}, which is not stored in {tier}")
        started = time.perf_counter()
        value = store.take(key) if last_use else store.get(key)
        self.io_seconds += time.perf_counter() - started
        if last_use:
            self._stored_bytes[tier] -= self._slots[tier].pop(key)
        return value

    def _free(self, tier: str, key: SlotKey) -> None:
        if key not in self._slots[tier]:
            raise ScheduleError(
                f"the schedule frees the {key.content} of step {key.step}, which is not stored in {tier}"
            )
        self._stored_bytes[tier] -= self._slots[tier].pop(key)
        self.stores[tier].remove(key)

    def release_all(self) -> None:
        """Release the working state, and remove all slots of this run from the stores."""
        for tier, slots in self._slots.items():
            for key in list(slots):
                if key in self.stores[tier]:
                    self.stores[tier].remove(key)
            slots.clear()
        self._set_state(None, None)

    # Counters and checks

    def _update_peak(self, extra_bytes: int = 0) -> None:
        """Update `peak_bytes` and check the budget. `extra_bytes` are live beside state, adjoint and slots."""
        live_bytes = self._state_bytes + self._adjoint_bytes + extra_bytes + self.scratch_bytes
        if self._digests is not None and self._count_digests:
            live_bytes += len(self._digests)
        live_bytes += sum(stored for tier, stored in self._stored_bytes.items() if stored and self._in_memory[tier])
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        if self.budget_bytes is not None and live_bytes > self.budget_bytes:
            raise BudgetError(
                f"{format_bytes(live_bytes)} are live, more than the budget of {format_bytes(self.budget_bytes)}: "
                "a state, a tape or the adjoint is larger than the one measured at the initial state. Raise budget=, "
                "or pass the adjoint as a value, so that its size is known before the run",
                budget_bytes=self.budget_bytes,
                smallest_bytes=live_bytes,
            )

    def _check_digest(self, i: int, state: Any) -> None:
        """Record the digest of x_i, or compare it with the recorded one."""
        if self._digests is None:
            return
        code = digest(state)
        first = self._digests[(i - 1) * DIGEST_BYTES : i * DIGEST_BYTES]
        if not first:
            self._digests += code
        elif first != code:
            raise ReplayMismatchError(
                f"step {i - 1}{self._of_n()} returned a different x_{i} when it was run again: the gradient would be "
                "wrong. A step may depend only on its state and its index; keep random generators, counters and "
                "buffers in the state"
            )

    def _require_state(self, step: int, action: Action) -> None:
        if self.state_index != step:
            problem = (
                "there is no working state"
                if self.state_index is None
                else f"the working state is x_{self.state_index}"
            )
            raise ScheduleError(f"{action}: {problem}")

    def _of_n(self) -> str:
        return "" if self.n is None else f" of {self.n}"


def _with_next(actions: Iterable[Action]) -> Iterator[tuple[Action, Action | None]]:
    """Yield each action with its successor."""
    iterator = iter(actions)
    action = next(iterator, None)
    while action is not None:
        following = next(iterator, None)
        yield action, following
        action = following


def _matching_free(action: Action, following: Free) -> Free | None:
    """Return the `Free` of the slot that `action` reads, None if it reads no slot."""
    if isinstance(action, Load):
        return Free(action.step, action.tier, action.content)
    if isinstance(action, Reverse) and action.source == "tape":
        return Free(action.step, following.tier, "tape")
    return None
