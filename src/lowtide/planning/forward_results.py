"""What is there when backward begins, by what is kept: the first half of a trial.

Forward is not followed op by op: what recomputed ops want is gathered from its end. Says at once what is known of the
time already: what is noted, and that everything that backward needs and does not have is made again at least once.
"""

from __future__ import annotations

from itertools import accumulate
from operator import add

from .bit_layout import BitLayout
from .bits import Weights, where

_MOST_KNOWN = 4000
"""Beginnings that are remembered."""


class ForwardResult:
    """Where backward begins."""

    __slots__ = ("keep", "least_s", "live_bytes", "peak_bytes", "recipes", "state")

    def __init__(self, keep: int, state: int, live_bytes: int, least_s: float, recipes: int) -> None:
        self.keep = keep
        self.state = state
        self.live_bytes = live_bytes
        self.least_s = least_s
        """The extra time, if everything that has to be made again is made again once."""
        self.recipes = recipes
        """Ops that can be replayed in backward."""
        self.peak_bytes: int | None = None
        """Of forward, once somebody has asked."""


class ForwardResults:
    """All of one problem's. The same one is asked for again and again while other decisions change."""

    def __init__(self, layout: BitLayout) -> None:
        problem = layout.problem
        n = problem.n_ops
        trace = problem.trace
        self._layout = layout
        self._known: dict[int, ForwardResult] = {}
        self._every_op = (1 << n) - 1
        self._ones = [1 << j for j in range(n)]
        self._replay_s = Weights(problem.replay_overhead_s)
        self._nbytes = Weights(
            [0 if last >= 0 else size for size, last in zip(layout.nbytes, layout.last, strict=True)]
        )
        self._natural_bytes = sum(size for size, last in zip(layout.nbytes, layout.last, strict=True) if last >= 0)
        self._copying_s = trace.copying_s
        self._saved = where(problem.saved[v] for v in layout.values)
        self._asked = where(problem.saved[v] and bool(problem.unpacks_of[v]) for v in layout.values)
        self._natural_end = [problem.natural_end[v] for v in layout.values]
        self._recipe_end = [max((min(self._natural_end[v], n - 1) for v in made), default=-1) for made in layout.made]
        self._unsaved_read = [[v for v in read if not self._saved >> v & 1] for read in layout.read]
        # By op: bytes that come with it and go before it, if everything is kept; what goes after the last is left out.
        self._change = [0] * (n + 2)
        self._kept_change: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for v, size in enumerate(layout.nbytes):
            end = min(self._natural_end[v], n)
            self._change[layout.producer[v]] += size
            if self._saved >> v & 1:
                self._kept_change[layout.producer[v]].append((end + 1, size))
            else:
                self._change[end + 1] -= size
        self._forward_other = [op.other_bytes for op in trace.ops]

    def of(self, keep: int) -> ForwardResult:
        """With these ops kept."""
        found = self._known.get(keep)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[keep] = self._begin(keep)
        return found

    def peak_bytes(self, beginning: ForwardResult) -> int:
        """The most that is alive in forward."""
        if beginning.peak_bytes is None:
            beginning.peak_bytes = self._forward_peak(beginning)
        return beginning.peak_bytes

    def _begin(self, keep: int) -> ForwardResult:
        layout, ones = self._layout, self._ones
        made_by, read_by = layout.made_bits, layout.read_bits
        left = self._every_op & ~keep
        wanted, recipes, made_again = self._saved, 0, 0
        while left:  # from the end: who reads it wants it
            j = left.bit_length() - 1
            one = ones[j]
            left ^= one
            made = made_by[j]
            made_again |= made
            if made & wanted:
                recipes |= one
                wanted |= read_by[j]
        there = wanted & ~made_again
        needed = recipes if self._asked == self._saved else self._needed(recipes)
        return ForwardResult(
            keep,
            layout.state(there, recipes, needed),
            self._natural_bytes + self._nbytes.total(there),
            self._copying_s + self._replay_s.total(needed),
            recipes,
        )

    def _needed(self, recipes: int) -> int:
        """Of these ops: without those that are only wanted by handles that are never asked."""
        layout, wanted, needed = self._layout, self._asked, 0
        while recipes:
            j = recipes.bit_length() - 1
            recipes ^= self._ones[j]
            if layout.made_bits[j] & wanted:
                needed |= self._ones[j]
                wanted |= layout.read_bits[j]
        return needed

    def _forward_peak(self, beginning: ForwardResult) -> int:
        layout, keep, recipes, ones = self._layout, beginning.keep, beginning.recipes, self._ones
        n, made_by, unsaved_read, natural_end = layout.problem.n_ops, layout.made, self._unsaved_read, self._natural_end
        change = self._change[:]
        until: dict[int, int] = {}  # by value without a handle: the op until which a recipe wants it
        left = self._every_op & ~keep
        while left:
            j = left.bit_length() - 1
            left ^= ones[j]
            for after, size in self._kept_change[j]:
                change[after] -= size
            if recipes & ones[j]:
                end = n
            else:
                end = self._recipe_end[j]
                for v in made_by[j]:
                    if until.get(v, -1) > end:
                        end = until[v]
            for v in unsaved_read[j]:
                if until.get(v, -1) < end:
                    until[v] = end
        for v, end in until.items():
            if end > natural_end[v] and keep & ones[layout.producer[v]]:
                change[natural_end[v] + 1] += layout.nbytes[v]
                if end < n:
                    change[end + 1] -= layout.nbytes[v]
        return max(map(add, accumulate(change), self._forward_other), default=0)
