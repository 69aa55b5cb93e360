"""A schedule for a chain of unknown length.

Papers: P. Stumm and A. Walther, "New algorithms for optimal online checkpointing", SIAM J. Sci. Comput. 32
(2010); Q. Wang, P. Moin and G. Iaccarino, "Minimal repetition dynamic checkpointing algorithm for unsteady
adjoint calculation", ibid. 31 (2009). Both place checkpoints by a fixed rule at every step.

Method: assume that the chain ends a tenth later than the current step. Find the best checkpoints for this
end: which stored ones to keep, and where to place new ones. Repeat when the assumed end is passed. A checkpoint
is freed only when its slot is needed. At the real end, use the best subset of the stored checkpoints.

Guarantee: at most `slots` slots, and an optimal reverse sweep for the checkpoints stored at the end. The
total is measured, not proven. At some hundreds of lengths from 100 steps, the forward steps were at most
1.10 times those of `revolve`, and at most 1.06 times from 4 slots on (2 to 200 slots up to 10,000 steps; 3, 5,
10 and 50 slots up to a million steps). The rule of Wang et al. has a proven bound of about (r + 1)·n steps,
with the r of `revolve`. Measured for 5, 10 and 50 slots, it takes up to 1.3 times the optimum, and about ten
times as many writes.

Limits: no theoretical bound. Every online schedule needs extra steps because it notices the end late: a third
of the optimum and more for two or three steps. Measured up to 20 slots and 200 steps, this schedule takes at
most 1.11 times the minimum over online schedules. Planning takes `slots` vector operations on 16·`slots`
numbers each time the chain grows by a tenth, which is noticeable from some hundreds of slots.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..._errors import ArgumentError, ScheduleError
from ._actions import Action, Advance, Free, Load, Schedule, Store, Tiers
from ._revolve import binomial_steps, reverse_segment

_Ints = npt.NDArray[np.int64]

_LOOK_AHEAD = 10
"""The assumed end is here + here / _LOOK_AHEAD. Doubled: plans twice as often; 5 to 50 give similar steps."""
_MAX_DROPPED = 16
"""One plan drops fewer than this many consecutive checkpoints. Doubled: planning takes twice as long."""
_INFINITY = 2**62


class Online(Schedule):
    """The schedule of `online`. Perform each action before requesting the next one:

        for action in schedule.forward():       # Store, Free and Advance(i, i + 1), without an end
            perform(action)
            if isinstance(action, Advance) and is_end(state):
                schedule.finish()               # the working state is x_n; forward() stops
        for action in schedule.reverse():
            perform(action)

    `n`, `forward_steps`, `explain()` and iteration are available after `finish()`. Iteration gives the actions
    of both parts.
    """

    name = "online"

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ArgumentError(f"a chain of unknown length needs at least one slot, not {slots}")
        self.slots = slots
        self._reset()

    def __repr__(self) -> str:
        return f"online({self.slots})"

    def _reset(self) -> None:
        self.n: int | None = None
        self._here = 0
        self._stored: list[int] = []
        self._peak_stored = 0

    def forward(self) -> Iterator[Action]:
        """Yield the forward sweep from x_0, one step per action, until `finish()` is called.

        Each call starts a new run.
        """
        self._reset()
        kept: list[int] = []
        target, next_checkpoint = self.slots + 1, 0
        while not self._is_finished():
            here = self._here
            if here >= target:
                target = here + max(1, here // _LOOK_AHEAD)
                kept, next_checkpoint = _plan(self._stored, here, target, self.slots)
            if here == next_checkpoint:
                if len(self._stored) == self.slots:
                    victim = _least_useful(self._stored, kept, here)
                    self._stored.remove(victim)
                    yield Free(victim)
                self._stored.append(here)
                self._peak_stored = max(self._peak_stored, len(self._stored))
                insort(kept, here)
                yield Store(here)
                next_checkpoint = _next_checkpoint(here, target, self.slots - len(kept) + 1)
                if self._is_finished():
                    return
            self._here = here + 1
            yield Advance(here, here + 1)

    def finish(self) -> int:
        """Declare the current working state to be the end x_n, and return n."""
        if self._here == 0:
            raise ScheduleError("finish() before the first Advance: there is no step to reverse")
        if self.n is None:
            self.n = self._here
        return self.n

    def reverse(self) -> Iterator[Action]:
        """Yield the reverse sweep from the stored checkpoints. Repeated calls give the same actions."""
        stop = self._known_length()
        best = self._best_subset()
        for step in self._stored:
            if step not in best:
                yield Free(step)
        for rank in range(len(best) - 1, -1, -1):
            start = best[rank]
            yield Load(start)
            yield from reverse_segment(start, stop, self.slots - rank, stored=True)
            stop = start

    def replay(self, n: int) -> Iterator[Action]:
        """Return all actions of a run of `n` steps. Does not change this object."""
        if n < 1:
            raise ArgumentError(f"a chain has at least one step, not {n}")
        return self._replay(n)

    def _replay(self, n: int) -> Iterator[Action]:
        run = Online(self.slots)
        for action in run.forward():
            yield action
            if isinstance(action, Advance) and action.stop == n:
                run.finish()
        yield from run.reverse()

    def __iter__(self) -> Iterator[Action]:
        return self.replay(self._known_length())

    @property
    def forward_steps(self) -> int:
        """Steps of the forward sweep, plus the binomial optimum of each segment between checkpoints."""
        n = self._known_length()
        bounds = [*self._best_subset(), n]
        return n + sum(
            binomial_steps(stop - start, self.slots - rank) for rank, (start, stop) in enumerate(pairwise(bounds))
        )

    @property
    def peak_slots(self) -> Tiers:
        """Peak slots in use. Before `finish()`, the given slots."""
        if self.n is None:
            return Tiers(memory=self.slots)
        peak = self._peak_stored
        for rank, (start, stop) in enumerate(pairwise([*self._best_subset(), self.n])):
            peak = max(peak, rank + min(self.slots - rank, stop - start - 1))
        return Tiers(memory=peak)

    def _best_subset(self) -> list[int]:
        n = self._known_length()
        useful = [step for step in self._stored if step < n]
        return _plan(useful, n, n, self.slots)[0]

    def _is_finished(self) -> bool:
        return self.n is not None

    def _known_length(self) -> int:
        if self.n is None:
            raise ScheduleError("the length of this online schedule is unknown: call finish() first")
        return self.n


def online(slots: int) -> Online:
    """Return a schedule for a chain of unknown length. `Online` explains how to run it."""
    return Online(slots)


class _Binomials:
    """The binomial optimum for arrays of lengths and one number of slots."""

    def __init__(self, slots: int, longest: int) -> None:
        self.slots = slots
        reach = [1]
        while slots > 1 and reach[-1] < longest:
            reach.append(reach[-1] * (slots + len(reach)) // len(reach))
        self.reach = np.array(reach, dtype=np.int64)  # C(slots + r, slots) for r = 0, 1, …
        self.saved = np.concatenate([[0], np.cumsum(self.reach)])  # C(slots + r, r − 1)

    def steps(self, lengths: _Ints) -> _Ints:
        """Return `binomial_steps` of each length."""
        if self.slots == 1:
            return lengths * (lengths + 1) // 2
        r = np.searchsorted(self.reach, lengths)
        steps: _Ints = (r + 1) * lengths - self.saved[r]
        return steps

    def nearest_split(self, lengths: _Ints) -> _Ints:
        """Return the smallest optimal split of each length above 1. `binomial_split` gives the largest."""
        r = np.searchsorted(self.reach, lengths)
        before = np.where(r > 1, self.reach[r - 2], 1)
        return np.maximum(before, lengths - (self.reach[r] - self.reach[r - 1]))


def _binomials(slots: int, longest: int) -> _Binomials:
    return _cached_binomials(slots, longest.bit_length())


@lru_cache(maxsize=1024)
def _cached_binomials(slots: int, bits: int) -> _Binomials:
    return _Binomials(slots, 2**bits)


def _plan(stored: list[int], here: int, target: int, slots: int) -> tuple[list[int], int]:
    """Find the best use of the `stored` checkpoints for a chain that ends at `target`.

    Returns the checkpoints to keep, and the position of the next one from `here` on, or -1 for none.
    """
    positions = np.array(stored, dtype=np.int64)
    count = len(stored)
    width = min(_MAX_DROPPED, count)
    # [i, e]: the index of the (e + 1)-th checkpoint before i, and the distance to it.
    previous = np.arange(count)[:, None] - np.arange(1, width + 1)[None]
    exists = previous >= 0
    gaps = np.where(exists, positions[:, None] - positions[np.maximum(previous, 0)], 1)
    costs = np.full(count, _INFINITY, dtype=np.int64)  # of all gaps up to i, if i is kept checkpoint number `rank`
    costs[0] = 0
    origins: list[npt.NDArray[np.intp]] = []
    best, best_index, best_rank, next_checkpoint = _INFINITY, 0, 0, -1
    for rank in range(count):
        binomials = _binomials(slots - rank, target)
        cost_without, cost_with, split = _ending_costs(positions, here, target, binomials)
        for extra, new_positions in ((cost_without, None), (cost_with, split)):
            totals = costs + extra
            i = int(totals.argmin())
            if totals[i] < best:
                best, best_index, best_rank = int(totals[i]), i, rank
                next_checkpoint = -1 if new_positions is None else int(new_positions[i])
        if rank + 1 == count:
            break
        candidates = np.where(exists, costs[np.maximum(previous, 0)] + binomials.steps(gaps), _INFINITY)
        choice = candidates.argmin(axis=1)
        costs = np.minimum(candidates[np.arange(count), choice], _INFINITY)
        origins.append(previous[np.arange(count), choice])
    kept = [best_index]
    for origin in reversed(origins[:best_rank]):
        kept.append(int(origin[kept[-1]]))
    return [stored[i] for i in reversed(kept)], next_checkpoint


def _ending_costs(positions: _Ints, here: int, target: int, binomials: _Binomials) -> tuple[_Ints, _Ints, _Ints]:
    """Return the cost of the steps after each checkpoint, if it is the last one that is kept.

    First without new checkpoints, then with new ones from `here` on, then the position of the first new one.
    """
    length = target - positions
    cost_without = binomials.steps(length)
    infinite = np.full(len(positions), _INFINITY // 2, dtype=np.int64)
    if binomials.slots == 1 or here >= target:
        return cost_without, infinite, positions
    split = np.maximum(here, positions + binomials.nearest_split(np.maximum(length, 2)))
    after_split = np.maximum(target - split, 1)
    fewer_slots = _binomials(binomials.slots - 1, target)
    # The binomial formula includes a first sweep after the split, which the forward sweep does anyway.
    cost_with = binomials.steps(split - positions) + fewer_slots.steps(after_split) - (after_split - 1)
    return cost_without, np.where(split < target, cost_with, infinite), split


def _next_checkpoint(here: int, target: int, slots: int) -> int:
    """Return the position of the checkpoint after `here`, or -1 for none. `slots` includes the slot of x_here."""
    length = target - here
    if slots < 2 or length < 2:
        return -1
    split = _binomials(slots, length).nearest_split(np.array([length]))
    return here + int(split[0])


def _least_useful(stored: list[int], kept: list[int], here: int) -> int:
    """Return the checkpoint outside `kept` whose removal leaves the smallest gap."""
    bounds = [*stored, here]
    kept_set = set(kept)
    candidates = (i for i in range(1, len(stored)) if stored[i] not in kept_set)
    return stored[min(candidates, key=lambda i: bounds[i + 1] - bounds[i - 1])]
