"""The executor: obeys a schedule's actions with the user's functions, and keeps the accounts.

It holds one working state, the adjoint, and what the schedule stores. States are copied into slots and out
of them, so steps may write into their arguments and into buffers of their own. Whatever happens, nothing of
the run stays in a store. It trusts the schedule to be valid (`schedules.validate` is the judge) but says which
action it could not obey.
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

_RUNS = itertools.count()
DIGEST_BYTES = 8


class Functions(NamedTuple):
    """What the user brings."""

    step: Callable[[Any, int], Any]
    adjoint_step: Callable[[Any, Any, int], Any]
    tape_step: Callable[[Any, int], tuple[Any, Any]] | None
    adjoint_tape: Callable[[Any, Any, int], Any] | None


class SlotKey(NamedTuple):
    """The key of one slot: unlike that of any other run in the same store."""

    run: int
    what: str
    step: int


class Executor:
    """One sweep. `adjoint` is that of the final state, or a function of the final state."""

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
        self.at: int | None = 0
        """The working state is x_at."""
        self.state = copy(state)
        self._state_bytes = nbytes(state)
        self._from_step = False  # the working state came from `step`, which may keep it and write into it again
        self._torch = any(library(array) == "torch" for array in flatten(state)[0])
        self.terminal = adjoint if callable(adjoint) else None
        self.adjoint = None if callable(adjoint) else copy(adjoint)
        self._adjoint_bytes = nbytes(self.adjoint)
        self.stores = stores
        self._in_memory = {tier: store.tier == "memory" for tier, store in stores.items()}
        self.budget_bytes = budget_bytes
        self.scratch_bytes = scratch_bytes
        self.progress = progress
        self._run = next(_RUNS)
        self._slots: dict[str, dict[SlotKey, int]] = {"memory": {}, "disk": {}}
        self._stored_bytes = {"memory": 0, "disk": 0}
        self._digests = bytearray() if check_determinism else None
        self._count_digests = n is not None  # else nobody can plan for them
        self.peak_slots: dict[str, int] = {}
        self.peak_stored_bytes: dict[str, int] = {}
        self.peak_bytes = 0
        self.step_calls = self.forward_steps = 0
        self.forward_seconds = self.adjoint_seconds = self.io_seconds = 0.0

    # Obeying

    def obey(self, actions: Iterable[Action]) -> None:
        """Every action in turn."""
        done_early: Free | None = None
        for action, following in _with_next(actions):
            if done_early is not None and action == done_early:
                done_early = None
                continue
            # What is freed right after it is read is taken out instead of copied.
            last_use = isinstance(following, Free) and following == _freed_by(action, following)
            self.run(action, last_use=last_use)
            done_early = following if last_use and isinstance(following, Free) else None

    def run(self, action: Action, *, last_use: bool = False) -> None:
        """One action. With `last_use` the slot it reads is emptied."""
        if isinstance(action, Advance):
            self._expect(action.start, action)
            for i in range(action.start, action.stop):
                self.advance(i)
        elif isinstance(action, Store):
            self._expect(action.step, action)
            if action.what == "tape":
                self._store_tape(action.step, action.tier)
            else:
                self._put(action.tier, "state", action.step, self.state)
        elif isinstance(action, Load):
            self._work_on(None, None)  # let it go before the other one comes
            self._work_on(self._get(action.tier, "state", action.step, last_use), action.step)
            self._account()
        elif isinstance(action, Free):
            self._free(action.tier, self._key(action.what, action.step))
        elif isinstance(action, Reverse):
            self._reverse(action, last_use)

    def advance(self, i: int) -> None:
        """x_{i+1} from x_i."""
        self._work_on(self._step(self.state, i), i + 1, from_step=True)

    def _work_on(self, state: Any, at: int | None, *, from_step: bool = False) -> None:
        self.state, self.at, self._state_bytes = state, at, nbytes(state)
        self._from_step = from_step

    def _step(self, state: Any, i: int, *, counted: bool = True) -> Any:
        more = 0 if state is self.state else self._state_bytes
        started = time.perf_counter()
        try:
            after = self.functions.step(state, i)
        except Exception as error:
            add_note(error, f"in step {i}{self._of()}, forward")
            raise
        self.forward_seconds += time.perf_counter() - started
        if self._torch:
            after = detach(after)
        self.step_calls += 1
        if counted:
            self.forward_steps += 1
            self.progress.step()
        self._seen(i + 1, after)
        self._account(more + nbytes(after))
        return after

    def _store_tape(self, i: int, tier: str) -> None:
        if self.functions.tape_step is None:
            raise ArgumentError("this schedule stores tapes: pass tape_step= and adjoint_tape= to grad")
        started = time.perf_counter()
        try:
            after, tape = self.functions.tape_step(self.state, i)
        except Exception as error:
            add_note(error, f"in step {i}{self._of()}, taped")
            raise
        self.forward_seconds += time.perf_counter() - started
        after = detach(after) if self._torch else after
        self.forward_steps += 1
        self.progress.step()
        self._seen(i + 1, after)
        self._account(nbytes(after) + nbytes(tape))
        self._work_on(after, i + 1, from_step=True)
        self._put(tier, "tape", i, tape, beside=nbytes(tape))

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
            self._expect(i, action)
            self._own()
            source = self.state
            self._work_on(None, None)
            function = self.functions.adjoint_step
            self.forward_steps += 1
            self.progress.step()
        more = nbytes(source) + self._adjoint_bytes
        started = time.perf_counter()
        try:
            self.adjoint = function(source, self.adjoint, i)
        except Exception as error:
            add_note(error, f"in step {i}{self._of()}, adjoint")
            raise
        self.adjoint_seconds += time.perf_counter() - started
        if self._torch:
            self.adjoint = detach(self.adjoint)
        self._adjoint_bytes = nbytes(self.adjoint)
        self._account(more)

    def start_adjoint(self, n: int) -> None:
        """The adjoint of the final state x_n, unless it is there; the working state stays what it is."""
        self.n = n if self.n is None else self.n
        if self.terminal is None:
            return
        if self.at == n:
            final = self.state
        else:
            self._expect(n - 1, Reverse(n - 1))
            last = self.state
            self._from_step = True  # the step may write into its argument, and that is needed once more
            self._own()
            # Schedules count it already: it is the forward step for which reversing from a state stands.
            final = self._step(last, n - 1, counted=False)
            del last
        started = time.perf_counter()
        try:
            adjoint = self.terminal(final)
        except Exception as error:
            add_note(error, f"in the adjoint of the final state x_{n}")
            raise
        self.adjoint_seconds += time.perf_counter() - started
        self.adjoint = copy(adjoint)  # it may share memory with the state
        self._adjoint_bytes = nbytes(adjoint)
        self.terminal = None
        self._account(nbytes(adjoint) + (nbytes(final) if final is not self.state else 0))

    def _own(self) -> None:
        """Make the working state a private copy."""
        if self._from_step:
            self._account(self._state_bytes)
            self._work_on(copy(self.state), self.at)

    # Slots

    def _key(self, what: str, step: int) -> SlotKey:
        return SlotKey(self._run, what, step)

    def _put(self, tier: str, what: str, step: int, value: Any, beside: int = 0) -> None:
        started = time.perf_counter()
        key, store = self._key(what, step), self.stores[tier]
        store.put(key, value)
        self.io_seconds += time.perf_counter() - started
        slots = self._slots[tier]
        slots[key] = store.entry(key).nbytes
        self._stored_bytes[tier] += slots[key]
        self.peak_slots[tier] = max(self.peak_slots.get(tier, 0), len(slots))
        self.peak_stored_bytes[tier] = max(self.peak_stored_bytes.get(tier, 0), self._stored_bytes[tier])
        self._account(beside)

    def _get(self, tier: str, what: str, step: int, last_use: bool) -> Any:
        key, store = self._key(what, step), self.stores[tier]
        if key not in self._slots[tier]:
            raise ScheduleError(f"the {what} of step {step} is wanted, but it is not stored in {tier}")
        started = time.perf_counter()
        value = store.take(key) if last_use else store.get(key)
        self.io_seconds += time.perf_counter() - started
        if last_use:
            self._stored_bytes[tier] -= self._slots[tier].pop(key)
        return value

    def _free(self, tier: str, key: SlotKey) -> None:
        if key not in self._slots[tier]:
            raise ScheduleError(f"the {key.what} of step {key.step} is to be freed, but is not stored in {tier}")
        self._stored_bytes[tier] -= self._slots[tier].pop(key)
        self.stores[tier].remove(key)

    def empty(self) -> None:
        """Take everything of this run out of the stores."""
        for tier, slots in self._slots.items():
            for key in list(slots):
                if key in self.stores[tier]:
                    self.stores[tier].remove(key)
            slots.clear()
        self._work_on(None, None)

    # Accounts and checks

    def _account(self, more_bytes: int = 0) -> None:
        """Note what is held now, with `more_bytes` beside the working state, the adjoint and the slots."""
        held = self._state_bytes + self._adjoint_bytes + more_bytes + self.scratch_bytes
        if self._digests is not None and self._count_digests:
            held += len(self._digests)
        held += sum(stored for tier, stored in self._stored_bytes.items() if stored and self._in_memory[tier])
        self.peak_bytes = max(self.peak_bytes, held)
        if self.budget_bytes is not None and held > self.budget_bytes:
            raise BudgetError(
                f"{format_bytes(held)} are held, more than the budget of {format_bytes(self.budget_bytes)}: "
                "a state, a tape or the adjoint is larger than the initial state let expect. Raise budget=, "
                "or pass the adjoint as a value, whose size is known beforehand",
                budget_bytes=self.budget_bytes,
                smallest_bytes=held,
            )

    def _seen(self, i: int, state: Any) -> None:
        """Compare x_i with what it was the first time."""
        if self._digests is None:
            return
        code = digest(state)
        first = self._digests[(i - 1) * DIGEST_BYTES : i * DIGEST_BYTES]
        if not first:
            self._digests += code
        elif first != code:
            raise ReplayMismatchError(
                f"step {i - 1}{self._of()} gave another x_{i} when it was run again: the adjoint would belong to "
                "another trajectory. Let the step depend on nothing but its state and its number (random "
                "generators, counters and buffers belong into the state)"
            )

    def _expect(self, step: int, action: Action) -> None:
        if self.at != step:
            now = "there is no working state" if self.at is None else f"the working state is x_{self.at}"
            raise ScheduleError(f"{action}: {now}")

    def _of(self) -> str:
        return "" if self.n is None else f" of {self.n}"


def _with_next(actions: Iterable[Action]) -> Iterator[tuple[Action, Action | None]]:
    """Each action with the one after it."""
    iterator = iter(actions)
    action = next(iterator, None)
    while action is not None:
        following = next(iterator, None)
        yield action, following
        action = following


def _freed_by(action: Action, following: Free) -> Free | None:
    """The `Free` that would empty the slot that `action` reads."""
    if isinstance(action, Load):
        return Free(action.step, action.tier, action.what)
    if isinstance(action, Reverse) and action.source == "tape":
        return Free(action.step, following.tier, "tape")
    return None
