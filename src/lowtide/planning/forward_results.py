"""The result of forward, for the fast judge: peak, state and live bytes when backward begins, by the set of kept ops.

Forward is not simulated op by op. One pass over the recomputed ops, from the last to the first, finds what backward
needs. This also gives a lower bound on the extra time: backward replays everything that it needs at least once.
"""

from __future__ import annotations

from itertools import accumulate
from operator import add

from .bit_layout import BitLayout
from .bits import Weights, bits_where

_CACHE_SIZE = 4000
"""Results in the cache, which is emptied when it is full. Doubled: annealing takes the same time within 2 %."""


class ForwardResult:
    """The state of a step when backward begins."""

    __slots__ = ("keep", "live_bytes", "min_extra_s", "peak_bytes", "recipes", "state")

    def __init__(self, keep: int, state: int, live_bytes: int, min_extra_s: float, recipes: int) -> None:
        self.keep = keep
        self.state = state
        self.live_bytes = live_bytes
        self.min_extra_s = min_extra_s
        """Extra time if every op that backward needs is replayed once."""
        self.recipes = recipes
        """The ops that have a recipe in backward."""
        self.peak_bytes: int | None = None
        """Peak of forward, once it has been computed."""


class ForwardResults:
    """The forward results of one problem, cached, because searches often change only which ops are released."""

    def __init__(self, layout: BitLayout) -> None:
        problem = layout.problem
        n = problem.n_ops
        trace = problem.trace
        last_unpack = layout.natural_last_unpack
        self._layout = layout
        self._cache: dict[int, ForwardResult] = {}
        self._all_ops = (1 << n) - 1
        self._one_bit = [1 << j for j in range(n)]
        self._replay_s = Weights(problem.replay_s)
        # Values that others hold in backward are live in any case: counted once, not by decision.
        self._nbytes = Weights(
            [0 if last >= 0 else nbytes for nbytes, last in zip(layout.nbytes, last_unpack, strict=True)]
        )
        self._natural_bytes = sum(nbytes for nbytes, last in zip(layout.nbytes, last_unpack, strict=True) if last >= 0)
        self._copying_s = trace.copying_s
        self._saved = bits_where(problem.saved[v] for v in layout.values)
        self._unpacked = bits_where(problem.saved[v] and bool(problem.unpacks_of[v]) for v in layout.values)
        self._natural_end = [problem.natural_end[v] for v in layout.values]
        self._recipe_end = [
            max((min(self._natural_end[v], n - 1) for v in outputs), default=-1) for outputs in layout.outputs
        ]
        self._unsaved_inputs = [[v for v in inputs if not self._saved >> v & 1] for inputs in layout.inputs]
        # By op: change of the live bytes before it if all ops are kept. Saved values stay until the end of forward.
        self._change = [0] * (n + 2)
        # By op, for its saved outputs: the op before which they are freed if the op is recomputed, and their bytes.
        self._freed_if_recomputed: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for v, nbytes in enumerate(layout.nbytes):
            end = min(self._natural_end[v], n)
            self._change[layout.producer[v]] += nbytes
            if self._saved >> v & 1:
                self._freed_if_recomputed[layout.producer[v]].append((end + 1, nbytes))
            else:
                self._change[end + 1] -= nbytes
        self._forward_other = [op.other_bytes for op in trace.ops]

    def of(self, keep: int) -> ForwardResult:
        """Return the result if exactly the ops in `keep` are kept."""
        result = self._cache.get(keep)
        if result is None:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            result = self._cache[keep] = self._compute(keep)
        return result

    def peak_bytes(self, result: ForwardResult) -> int:
        """Return the peak of forward. It is computed on the first call."""
        if result.peak_bytes is None:
            result.peak_bytes = self._compute_peak(result)
        return result.peak_bytes

    def _compute(self, keep: int) -> ForwardResult:
        layout, one_bit = self._layout, self._one_bit
        output_bits, input_bits = layout.output_bits, layout.input_bits
        remaining = self._all_ops & ~keep
        needed, recipes, recomputed = self._saved, 0, 0
        while remaining:  # the last op first: an op is needed if a later recipe or a handle uses its outputs (B1)
            j = remaining.bit_length() - 1
            bit = one_bit[j]
            remaining ^= bit
            outputs = output_bits[j]
            recomputed |= outputs
            if outputs & needed:
                recipes |= bit
                needed |= input_bits[j]
        resident = needed & ~recomputed  # B2
        replayed = recipes if self._unpacked == self._saved else self._replayed(recipes)
        return ForwardResult(
            keep,
            layout.initial_state(resident, recipes, replayed),
            self._natural_bytes + self._nbytes.total(resident),
            self._copying_s + self._replay_s.total(replayed),
            recipes,
        )

    def _replayed(self, recipes: int) -> int:
        """Return the recipes without those that serve only values that are saved and never unpacked."""
        layout, needed, replayed = self._layout, self._unpacked, 0
        while recipes:
            j = recipes.bit_length() - 1
            recipes ^= self._one_bit[j]
            if layout.output_bits[j] & needed:
                replayed |= self._one_bit[j]
                needed |= layout.input_bits[j]
        return replayed

    def _compute_peak(self, result: ForwardResult) -> int:
        layout, keep, recipes, one_bit = self._layout, result.keep, result.recipes, self._one_bit
        outputs, unsaved_inputs, natural_end = layout.outputs, self._unsaved_inputs, self._natural_end
        n = layout.problem.n_ops
        change = self._change[:]
        needed_until: dict[int, int] = {}  # by value without a handle: the last op at which a recipe reads it
        remaining = self._all_ops & ~keep
        while remaining:
            j = remaining.bit_length() - 1
            remaining ^= one_bit[j]
            for freed_before, nbytes in self._freed_if_recomputed[j]:
                change[freed_before] -= nbytes
            # The recipe exists until `end`: one of its outputs is alive or has a user.
            if recipes & one_bit[j]:
                end = n
            else:
                end = self._recipe_end[j]
                for v in outputs[j]:
                    if needed_until.get(v, -1) > end:
                        end = needed_until[v]
            for v in unsaved_inputs[j]:
                if needed_until.get(v, -1) < end:
                    needed_until[v] = end
        # A kept value is live for as long as a recipe reads it.
        for v, end in needed_until.items():
            if end > natural_end[v] and keep & one_bit[layout.producer[v]]:
                change[natural_end[v] + 1] += layout.nbytes[v]
                if end < n:
                    change[end + 1] -= layout.nbytes[v]
        return max(map(add, accumulate(change), self._forward_other), default=0)
