"""The state of backward as the bits of one int, for judges in a hurry: what is where in it, and what never changes.

Values are numbered anew, without sources. For each of them there is a bit that says that it is in memory, and one that
says that those bytes are somebody else's too, who lets go of them later. For each op: whether it can be replayed,
whether its values are released after use, and whether it has yet to be replayed once. Who
wants a value follows from the ops that can be replayed, and from the handles, which come and go with the asks alone.
"""

from __future__ import annotations

from .bits import bits_of, where
from .problem import Problem


class BitLayout:
    """Of one problem. Sets of values are as in the state; sets of ops have to be shifted there."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        n = problem.n_ops
        self.values = [v for v in range(problem.n_values) if problem.producer[v] >= 0]
        """By number: the problem's."""
        number = {v: i for i, v in enumerate(self.values)}
        m = len(self.values)
        self.recipe, self.away, self.unmade, self.shared = (m + i * n for i in range(4))
        """Where in a state each of these begins."""
        self.beyond = 1 << (2 * m + 3 * n)
        """A bit that is in no state."""
        self.nbytes = [problem.nbytes[v] for v in self.values]
        self.producer = [problem.producer[v] for v in self.values]
        self.last = [problem.natural_last_unpack[v] for v in self.values]
        """By value: the ask after which others let go of it, or -1 if none hold it in backward."""
        self.made = [[number[v] for v in made] for made in problem.outputs]
        self.read = [[number[v] for v in read] for read in problem.inputs]
        self.made_bits = [bits_of(made) for made in self.made]
        self.read_bits = [bits_of(read) for read in self.read]
        self.asked = [number.get(v, -1) for v in problem.unpack_value]
        """By ask: the value, or -1 for a source."""
        self.freed = [[number[v] for v in freed] for freed in problem.freed_after]
        self.number = number
        self._natural = where(last >= 0 for last in self.last)
        self._settle_handles()

    def _settle_handles(self) -> None:
        handles, given = where(self.problem.saved[v] for v in self.values), 0
        self.handles: list[int] = []
        """By ask: the values that have a handle, until it is answered."""
        self.given: list[int] = []
        """By ask: the values of which a handle has been given the memory, before it."""
        for asked, freed in zip(self.asked, self.freed, strict=True):
            self.handles.append(handles)
            self.given.append(given)
            if asked >= 0:
                given |= 1 << asked
            handles &= ~bits_of(freed)
            given &= ~bits_of(freed)

    def state(self, there: int, recipes: int, unmade: int) -> int:
        """Of a backward that begins with these values, and with ops that can be replayed and have yet to be."""
        return there | recipes << self.recipe | unmade << self.unmade | (there & self._natural) << self.shared
