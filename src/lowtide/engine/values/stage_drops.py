"""Drops: when a plan for a step with several backward passes releases recomputed values.

A recomputed value normally gets its tensor by its first replay, and then loses its recipe. A plan with drops keeps the
recipe: after the unpack that the plan names, the value is released, and a later unpack replays it again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

from ...records import Plan
from .value import Value


class StageDrops:
    """The drops of one planned step that are still to come."""

    def __init__(self, plan: Plan) -> None:
        self._held = frozenset(plan.held)
        self._tails = frozenset(plan.tails)
        self._by_unpack: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for save, nth, op, output in plan.drops:
            self._by_unpack.setdefault((save, nth), []).append((op, output))
        self._saves = frozenset(save for save, _, _, _ in plan.drops)
        self._to_come = Counter(op for _, _, op, _ in plan.drops)
        self._ops = self._held | self._tails | set(self._to_come)
        self._values: dict[tuple[int, int], weakref.ref[Value]] = {}

    def concerns(self, op: int) -> bool:
        """Return whether the plan holds or drops the values of this op."""
        return op in self._ops

    def op_recorded(self, op: int, values: Sequence[Value]) -> None:
        """Note the outputs of an op that has been recorded."""
        for position, value in enumerate(values):
            value.held = op in self._held
            self._values[op, position] = weakref.ref(value)

    def follows(self, save: int) -> bool:
        """Return whether something is released after an unpack of this saved tensor."""
        return save in self._saves

    def unpacked(self, save: int, nth: int) -> None:
        """A saved tensor has been unpacked for the `nth` time, from 0: release what the plan says."""
        for op, position in self._by_unpack.pop((save, nth), ()):
            self._to_come[op] -= 1
            ref = self._values.get((op, position))
            value = ref() if ref is not None else None
            if value is not None and value.recipe is not None:
                value.held = False
                value.release()

    def keeps_recipe(self, value: Value) -> bool:
        """Return whether a value that was just replayed may have to be replayed again."""
        return value.origin is not None and self.keeps_recipe_of(value.origin.number)

    def keeps_recipe_of(self, op: int) -> bool:
        """Return whether this op may have to be replayed again after its next replay."""
        return self._to_come[op] > 0 or op in self._tails
