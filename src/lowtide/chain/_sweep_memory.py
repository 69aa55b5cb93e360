"""How many slots fit into a budget: what a sweep holds beside its slots, measured from the first state.

The sizes are those of the initial state, of the adjoint (where it is a function of the final state, of what
that makes of the initial one), and of one tape where tapes are stored. The executor checks them as it runs.
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
    """Bytes that a sweep needs, apart from fixed ones."""

    state_bytes: int
    adjoint_bytes: int
    slot_bytes: int
    """Of one slot, as the store will hold it."""
    beside_bytes: int
    """The most that is alive beside the slots: in a forward step, a reverse step or at the turn."""

    @classmethod
    def measured(cls, functions: Functions, state: Any, adjoint: Any, store: ActivationStore) -> SweepMemory:
        """From one state, one adjoint, and one tape where there are tapes (for which one step is run)."""
        size, slot = nbytes(state), store.measure(state)
        try:
            other = nbytes(adjoint(copy(state)) if callable(adjoint) else adjoint)
        except Exception as error:
            add_note(
                error, "in adjoint(initial state), called to measure its size; pass a value, or slots=, not budget="
            )
            raise
        beside = max(2 * size + other, size + 2 * other)
        if callable(adjoint):
            # At the turn: the last state twice and the final one, then the adjoint as made and as copied.
            beside = max(beside, 3 * size, 2 * size + 2 * other)
        if functions.tape_step is not None:
            tape = functions.tape_step(copy(state), 0)[1]
            beside = max(beside, 2 * size + nbytes(tape) + other, size + nbytes(tape) + 2 * other)
            slot = max(slot, store.measure(tape))
        return cls(size, other, slot, beside)

    def slots(self, n: int | None, budget_bytes: int | None, store: ActivationStore, fixed_bytes: int) -> int:
        """How many slots fit into the budget and into the store."""
        limits = []
        if store.slots is not None:
            limits.append(store.slots)
        if store.budget_bytes is not None:
            limits.append(store.budget_bytes // max(self.slot_bytes, 1))
        in_memory = self.slot_bytes if store.tier == "memory" else 0
        if budget_bytes is not None:
            least = 0 if n == 1 else 1
            free = budget_bytes - self.beside_bytes - fixed_bytes
            if free < least * in_memory:
                raise BudgetError(
                    self._too_small(budget_bytes, fixed_bytes, least * in_memory),
                    budget_bytes=budget_bytes,
                    smallest_bytes=budget_bytes - free + least * in_memory,
                )
            if in_memory:
                limits.append(max(free // in_memory, 1))
            elif n is not None:
                limits.append(n)
        if not limits:
            raise ArgumentError(
                "how much may be stored? Pass slots=, budget= (such as '4 GiB'), schedule=, "
                "or a store with a budget or slots"
            )
        return max(min(limits), 1)

    def _too_small(self, budget_bytes: int, fixed_bytes: int, slot_bytes: int) -> str:
        smallest = self.beside_bytes + fixed_bytes + slot_bytes
        return (
            f"a budget of {format_bytes(budget_bytes)} is too small: the smallest that works is "
            f"{format_bytes(smallest)} ({smallest:,} bytes), which is {format_bytes(self.beside_bytes)} for the "
            f"working state, its successor and the adjoints (a state has {format_bytes(self.state_bytes)}, the adjoint "
            f"{format_bytes(self.adjoint_bytes)}), {format_bytes(fixed_bytes)} for scratch and checks, and "
            f"{format_bytes(slot_bytes)} for one slot. Slots on disk (store=) or a narrower precision take less"
        )
