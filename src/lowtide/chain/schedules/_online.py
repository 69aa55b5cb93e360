"""A schedule for a chain whose length is unknown until it has been run.

Papers: P. Stumm and A. Walther, "New algorithms for optimal online checkpointing", SIAM J. Sci. Comput. 32
(2010); Q. Wang, P. Moin and G. Iaccarino, "Minimal repetition dynamic checkpointing algorithm for unsteady
adjoint calculation", ibid. 31 (2009). They decide at every step by a fixed rule. Here the chain is taken to
end a tenth later than where it is, the best set of checkpoints for that end is found (which of those there
are to keep, where to put new ones), and when that end is passed, the next one is planned for. Old
checkpoints are given up only when their slot is needed, and when the end has come the best subset of what
is then stored is used.

Guarantee: never more than `slots` slots, and the reverse sweep is optimal for the checkpoints that are there
when the end comes. That the whole is near the optimum for a known length is measured, not proven: at some
hundreds of lengths, from 100 steps on, the forward steps were at most 1.10 times those of `revolve`, from 4
slots on at most 1.06 times (2 to 200 slots up to 10,000 steps; 3, 5, 10 and 50 slots up to a million). The
rule of Wang et al. has a proof: about (r + 1)·n steps at most, with the r of `revolve`; measured for 5, 10
and 50 slots it takes up to 1.3 times the optimum, and writes about ten times as often.

Shortfall: no bound by theory. That the end is seen only when it is there costs any online schedule something,
which for chains of two or three steps is a third of the optimum and more; of what no online schedule can do
without, this one took at most 1.11 times (up to 20 slots, each length below 200). Planning takes `slots`
vector operations on 16·`slots` numbers for each tenth by which the chain grows: felt from some hundreds of
slots on.
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
"""A plan is made for a chain longer by one part in so many. Anything from 5 to 50 gives much the same."""
_RUN = 16
"""No more than so many neighbouring checkpoints are given up by one plan."""
_FAR = 2**62


class Online(Schedule):
    """What `online` returns. Run it in three parts, each action before the next one is asked for:

        for action in schedule.forward():       # Store, Free and Advance(i, i + 1), without an end
            perform(action)
            if isinstance(action, Advance) and at_the_end(state):
                schedule.finish()               # the working state is x_n; forward() ends by itself
        for action in schedule.reverse():
            perform(action)

    Only after `finish()` are `n`, `forward_steps` and `explain()` known, and iterating possible: it gives
    the actions of both parts.
    """

    name = "online"

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ArgumentError(f"a chain of unknown length needs at least one slot, not {slots}")
        self.slots = slots
        self._begin()

    def __repr__(self) -> str:
        return f"online({self.slots})"

    def _begin(self) -> None:
        self.n: int | None = None
        self._here = 0
        self._stored: list[int] = []
        self._most = 0

    def forward(self) -> Iterator[Action]:
        """The forward sweep from x_0, one step an action, until `finish()` is called. Starts anew."""
        self._begin()
        kept: list[int] = []
        target, following = self.slots + 1, 0
        while not self._is_over():
            here = self._here
            if here >= target:
                target = here + max(1, here // _LOOK_AHEAD)
                kept, following = _plan(self._stored, here, target, self.slots)
            if here == following:
                if len(self._stored) == self.slots:
                    victim = _most_dispensable(self._stored, kept, here)
                    self._stored.remove(victim)
                    yield Free(victim)
                self._stored.append(here)
                self._most = max(self._most, len(self._stored))
                insort(kept, here)
                yield Store(here)
                following = _next_checkpoint(here, target, self.slots - len(kept) + 1)
                if self._is_over():
                    return
            self._here = here + 1
            yield Advance(here, here + 1)

    def finish(self) -> int:
        """Say that the working state, after the action performed last, is the end x_n; returns n."""
        if self._here == 0:
            raise ScheduleError("finish() before the first Advance: there is no step to reverse")
        if self.n is None:
            self.n = self._here
        return self.n

    def reverse(self) -> Iterator[Action]:
        """The reverse sweep from what is stored; repeatable as a plan, once as a run."""
        stop = self._known_length()
        best = self._best_subset()
        for step in self._stored:
            if step not in best:
                yield Free(step)
        for place in range(len(best) - 1, -1, -1):
            start = best[place]
            yield Load(start)
            yield from reverse_segment(start, stop, self.slots - place, stored=True)
            stop = start

    def replay(self, n: int) -> Iterator[Action]:
        """Every action of a run that turns out to have `n` steps. This object is left as it is."""
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
        """The forward sweep, and the binomial optimum between the checkpoints that are used."""
        n = self._known_length()
        bounds = [*self._best_subset(), n]
        return n + sum(
            binomial_steps(stop - start, self.slots - place) for place, (start, stop) in enumerate(pairwise(bounds))
        )

    @property
    def peak_slots(self) -> Tiers:
        """The most slots in use; before the end is known, those that were given."""
        if self.n is None:
            return Tiers(memory=self.slots)
        most = self._most
        for place, (start, stop) in enumerate(pairwise([*self._best_subset(), self.n])):
            most = max(most, place + min(self.slots - place, stop - start - 1))
        return Tiers(memory=most)

    def _best_subset(self) -> list[int]:
        n = self._known_length()
        useful = [step for step in self._stored if step < n]
        return _plan(useful, n, n, self.slots)[0]

    def _is_over(self) -> bool:
        return self.n is not None

    def _known_length(self) -> int:
        if self.n is None:
            raise ScheduleError("the length of this online schedule is not known before finish() is called")
        return self.n


def online(slots: int) -> Online:
    """The schedule for a chain that ends when it ends: see `Online` for how to run it."""
    return Online(slots)


class _Binomials:
    """The optimum for many lengths at once, with a given number of slots."""

    def __init__(self, slots: int, longest: int) -> None:
        self.slots = slots
        reach = [1]
        while slots > 1 and reach[-1] < longest:
            reach.append(reach[-1] * (slots + len(reach)) // len(reach))
        self.reach = np.array(reach, dtype=np.int64)  # C(slots + r, slots) for r = 0, 1, …
        self.saved = np.concatenate([[0], np.cumsum(self.reach)])  # C(slots + r, r − 1)

    def steps(self, lengths: _Ints) -> _Ints:
        """As `binomial_steps`."""
        if self.slots == 1:
            return lengths * (lengths + 1) // 2
        r = np.searchsorted(self.reach, lengths)
        steps: _Ints = (r + 1) * lengths - self.saved[r]
        return steps

    def nearest_split(self, lengths: _Ints) -> _Ints:
        """The near end of the interval of which `binomial_split` gives the far end, for lengths above 1."""
        r = np.searchsorted(self.reach, lengths)
        before = np.where(r > 1, self.reach[r - 2], 1)
        return np.maximum(before, lengths - (self.reach[r] - self.reach[r - 1]))


def _binomials(slots: int, longest: int) -> _Binomials:
    return _tabulated(slots, longest.bit_length())


@lru_cache(maxsize=1024)
def _tabulated(slots: int, bits: int) -> _Binomials:
    return _Binomials(slots, 2**bits)


def _plan(stored: list[int], here: int, target: int, slots: int) -> tuple[list[int], int]:
    """The best use of the `stored` checkpoints for a chain that ends at `target`.

    Returns those to keep and where, from `here` on, the next one should be; -1 for nowhere.
    """
    places = np.array(stored, dtype=np.int64)
    count = len(stored)
    run = min(_RUN, count)
    # Row i, column e: the e-th checkpoint before i, and the gap to it; those that do not exist get no use.
    before = np.arange(count)[:, None] - np.arange(1, run + 1)[None]
    exists = before >= 0
    gaps = np.where(exists, places[:, None] - places[np.maximum(before, 0)], 1)
    costs = np.full(count, _FAR, dtype=np.int64)  # of all gaps up to i, where i is kept as number `rank`
    costs[0] = 0
    origins: list[npt.NDArray[np.intp]] = []
    best, best_place, best_rank, following = _FAR, 0, 0, -1
    for rank in range(count):
        binomials = _binomials(slots - rank, target)
        alone, split_cost, split = _endings(places, here, target, binomials)
        for extra, at in ((alone, None), (split_cost, split)):
            totals = costs + extra
            i = int(totals.argmin())
            if totals[i] < best:
                best, best_place, best_rank = int(totals[i]), i, rank
                following = -1 if at is None else int(at[i])
        if rank + 1 == count:
            break
        through = np.where(exists, costs[np.maximum(before, 0)] + binomials.steps(gaps), _FAR)
        choice = through.argmin(axis=1)
        costs = np.minimum(through[np.arange(count), choice], _FAR)
        origins.append(before[np.arange(count), choice])
    kept = [best_place]
    for origin in reversed(origins[:best_rank]):
        kept.append(int(origin[kept[-1]]))
    return [stored[i] for i in reversed(kept)], following


def _endings(places: _Ints, here: int, target: int, binomials: _Binomials) -> tuple[_Ints, _Ints, _Ints]:
    """What remains after the last checkpoint that is kept, for each as the last one.

    Its cost without another checkpoint, its cost with others from `here` on, and the first of those.
    """
    rest = target - places
    alone = binomials.steps(rest)
    never = np.full(len(places), _FAR // 2, dtype=np.int64)
    if binomials.slots == 1 or here >= target:
        return alone, never, places
    split = np.maximum(here, places + binomials.nearest_split(np.maximum(rest, 2)))
    beyond = np.maximum(target - split, 1)
    less = _binomials(binomials.slots - 1, target)
    # The first sweep over what lies beyond is counted by its formula, but is part of the sweep under way.
    cost = binomials.steps(split - places) + less.steps(beyond) - (beyond - 1)
    return alone, np.where(split < target, cost, never), split


def _next_checkpoint(here: int, target: int, slots: int) -> int:
    """Where the checkpoint after the one at `here` should be, which has `slots` with its own; or -1."""
    length = target - here
    if slots < 2 or length < 2:
        return -1
    split = _binomials(slots, length).nearest_split(np.array([length]))
    return here + int(split[0])


def _most_dispensable(stored: list[int], kept: list[int], here: int) -> int:
    """Of the checkpoints that are not to be kept, that without which the gap is smallest."""
    bounds = [*stored, here]
    wanted = set(kept)
    places = (i for i in range(1, len(stored)) if stored[i] not in wanted)
    return stored[min(places, key=lambda i: bounds[i + 1] - bounds[i - 1])]
