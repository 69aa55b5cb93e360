"""The number of slots that fit a budget, from the measured sizes of the initial state, adjoint and tape.

An `adjoint` function is measured on the initial state. The executor checks the real sizes during the run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .._errors import ArgumentError, BudgetError
from .._units import format_bytes
from ._arrays import copy, nbytes
from ._exception_notes import add_note
from ._executor import Functions
from .store import ActivationStore


class SweepMemory(NamedTuple):
    """Bytes that a sweep needs, without scratch and digests."""

    state_bytes: int
    adjoint_bytes: int
    slot_bytes: int
    """Bytes of one slot, as stored."""
    working_bytes: int
    """Peak bytes beside the slots: in a forward step, in a reverse step, or between the two sweeps."""

    @classmethod
    def measure(cls, functions: Functions, state: Any, adjoint: Any, store: ActivationStore) -> SweepMemory:
        """Measure one state, one adjoint and, by running one step, one tape if tapes are stored."""
        state_bytes, slot_bytes = nbytes(state), store.measure(state)
        try:
            adjoint_bytes = nbytes(adjoint(copy(state)) if callable(adjoint) else adjoint)
        except Exception as error:
            add_note(
                error, "in adjoint(initial state), called to measure its size; pass a value, or slots=, not budget="
            )
            raise
        working = max(2 * state_bytes + adjoint_bytes, state_bytes + 2 * adjoint_bytes)
        if callable(adjoint):
            # Between the sweeps: two copies of x_{n-1} and x_n, then the adjoint and its copy.
            working = max(working, 3 * state_bytes, 2 * state_bytes + 2 * adjoint_bytes)
        if functions.tape_step is not None:
            tape = functions.tape_step(copy(state), 0)[1]
            working = max(
                working,
                2 * state_bytes + nbytes(tape) + adjoint_bytes,
                state_bytes + nbytes(tape) + 2 * adjoint_bytes,
            )
            slot_bytes = max(slot_bytes, store.measure(tape))
        return cls(state_bytes, adjoint_bytes, slot_bytes, working)

    def slots(self, n: int | None, budget_bytes: int | None, store: ActivationStore, fixed_bytes: int) -> int:
        """Return the number of slots that fit both the budget and the store.

        `fixed_bytes` are the bytes of scratch and digests.
        """
        limits = []
        if store.slots is not None:
            limits.append(store.slots)
        if store.budget_bytes is not None:
            limits.append(store.budget_bytes // max(self.slot_bytes, 1))
        slot_bytes = self.slot_bytes if store.tier == "memory" else 0
        if budget_bytes is not None:
            smallest = self.working_bytes + fixed_bytes + (0 if n == 1 else slot_bytes)
            if budget_bytes < smallest:
                raise BudgetError(
                    self._too_small_message(budget_bytes, smallest, fixed_bytes),
                    budget_bytes=budget_bytes,
                    smallest_bytes=smallest,
                )
            if slot_bytes:
                limits.append(max((budget_bytes - self.working_bytes - fixed_bytes) // slot_bytes, 1))
            elif n is not None:
                limits.append(n)
        if not limits:
            raise ArgumentError(
                "no limit on stored states: pass slots=, budget= (such as '4 GiB'), schedule=, "
                "or a store with a budget or slots"
            )
        return max(min(limits), 1)

    def _too_small_message(self, budget_bytes: int, smallest: int, fixed_bytes: int) -> str:
        return (
            f"a budget of {format_bytes(budget_bytes)} is too small: the smallest that works is "
            f"{format_bytes(smallest)} ({smallest:,} bytes), which is {format_bytes(self.working_bytes)} for the "
            f"working state, its successor and the adjoints (a state has {format_bytes(self.state_bytes)}, the adjoint "
            f"{format_bytes(self.adjoint_bytes)}), {format_bytes(fixed_bytes)} for scratch and checks, and "
            f"{format_bytes(smallest - self.working_bytes - fixed_bytes)} for one slot. Slots on disk (store=) or a "
            "narrower precision need less"
        )
