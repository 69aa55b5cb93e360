"""The state of backward as the bits of one int, for the fast judge, and the facts that do not change.

Values are renumbered without sources. A state has one bit for each of these facts:

- by value, from 0: lowtide holds it in memory;
- by op, from `recipe`: it has a recipe (B1 of `backward`);
- by op, from `released`: its outputs are released after use (B6);
- by op, from `unreplayed`: it is still to be replayed for the first time;
- by value, from `shared`: others hold the memory of the value too (B11).

The users of a value (B1) follow from the recipes and from the handles. Handles depend on the unpack only.
"""

from __future__ import annotations

from .bits import bits_of, bits_where
from .problem import Problem


class BitLayout:
    """The layout of states for one problem. Sets of values are as in a state; sets of ops must be shifted."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        n = problem.n_ops
        self.values = [v for v in range(problem.n_values) if problem.producer[v] >= 0]
        """By new number: the number in the problem. All other lists here use new numbers."""
        number = {v: i for i, v in enumerate(self.values)}
        m = len(self.values)
        self.recipe, self.released, self.unreplayed, self.shared = (m + i * n for i in range(4))
        """Index of the first bit of each kind."""
        self.unused_bit = 1 << (2 * m + 3 * n)
        """A bit that is in no state."""
        self.nbytes = [problem.nbytes[v] for v in self.values]
        self.producer = [problem.producer[v] for v in self.values]
        self.natural_last_unpack = [problem.natural_last_unpack[v] for v in self.values]
        self.outputs = [[number[v] for v in outputs] for outputs in problem.outputs]
        self.inputs = [[number[v] for v in inputs] for inputs in problem.inputs]
        self.output_bits = [bits_of(outputs) for outputs in self.outputs]
        self.input_bits = [bits_of(inputs) for inputs in self.inputs]
        self.unpack_value = [number.get(v, -1) for v in problem.unpack_value]
        """By unpack: the value, or -1 for a source."""
        self.freed_after = [[number[v] for v in freed] for freed in problem.freed_after]
        self.number = number
        """By number in the problem: the new number."""
        self._naturally_alive = bits_where(last >= 0 for last in self.natural_last_unpack)
        self._compute_handles()

    def _compute_handles(self) -> None:
        handles, unpacked = bits_where(self.problem.saved[v] for v in self.values), 0
        self.handles: list[int] = []
        """By unpack: the values that have a handle during it."""
        self.unpacked: list[int] = []
        """By unpack: the values that were unpacked before and still have a handle."""
        for value, freed in zip(self.unpack_value, self.freed_after, strict=True):
            self.handles.append(handles)
            self.unpacked.append(unpacked)
            if value >= 0:
                unpacked |= 1 << value
            handles &= ~bits_of(freed)
            unpacked &= ~bits_of(freed)

    def initial_state(self, resident: int, recipes: int, unreplayed: int) -> int:
        """Return the state at the start of backward, from a set of values and two sets of ops. No op is released."""
        shared = resident & self._naturally_alive
        return resident | recipes << self.recipe | unreplayed << self.unreplayed | shared << self.shared
