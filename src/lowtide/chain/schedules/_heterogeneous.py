"""The cheapest schedule for steps of unequal cost and states of unequal size, within a budget in bytes.

Paper: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly and A. Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory" (2019), known as rotor.

Bytes that count: all stored states and tapes; `work_sizes[i]` while forward step i runs; `tape_sizes[i]`
while step i is taped, either to store the tape or in a `Reverse` from a state. The working state itself does
not count: include it in `work_sizes` if necessary.

Guarantee: the schedule never exceeds the budget, and its cost is minimal among *memory-persistent*
schedules. In these, a stored state stays until the reverse sweep has used it or until it is replaced by the
tape of its own step, and no earlier step runs in the meantime. The dynamic programme works on a grid of byte
counts. If the stored sizes have at most `levels` distinct sums within the budget, the grid holds all of them
and the optimum is exact. Otherwise sums are rounded up to about `levels` points: the schedule fits, but may
cost slightly more. `BudgetError` is raised only if no persistent schedule fits, and names the smallest
budget that works.

Limits: time O(n³·levels) and memory O(n²·levels), so chains of a few hundred steps. A schedule that is not
persistent can be cheaper: for two in a thousand random chains of up to seven steps, by up to a quarter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..._errors import ArgumentError, BudgetError
from ..._units import format_bytes, parse_bytes
from ._actions import Action, Advance, Free, Load, Reverse, Schedule, Store, Tiers
from ._smallest_budget import Chain, smallest_budget, sums_in_use

_Floats = npt.NDArray[np.float64]
_Bytes = npt.NDArray[np.int64]
_TABLE_ENTRIES = 2**24
"""Size of the cost table (128 MiB) above which the grid becomes coarser. Doubled: twice the memory and time."""
_MIN_LEVELS = 50
"""Lower limit on grid points, also if the table exceeds its limit. Doubled: twice the memory for long chains."""
_MAX_STEPS = 1500
"""Longest chain: its table takes about one gigabyte. Doubled: eight times the time, four times the memory."""


class Heterogeneous(Schedule):
    """The schedule of `heterogeneous`."""

    name = "heterogeneous"
    n: int

    def __init__(
        self,
        costs: Sequence[float],
        sizes: Sequence[int],
        budget_bytes: int | str,
        *,
        tape_sizes: Sequence[int] | None = None,
        work_sizes: Sequence[int] | None = None,
        backward_costs: Sequence[float] | None = None,
        levels: int | None = None,
    ) -> None:
        n = len(costs)
        _check(n, costs, sizes, tape_sizes, work_sizes, backward_costs, levels)
        self.n = n
        self.budget_bytes = parse_bytes(budget_bytes)
        self._costs = [float(cost) for cost in costs]
        self._chain = Chain(
            states=np.array(sizes, dtype=np.int64),
            tapes=np.array(tape_sizes if tape_sizes is not None else [0] * n, dtype=np.int64),
            work=np.array(work_sizes if work_sizes is not None else [0] * n, dtype=np.int64),
            can_store_tapes=tape_sizes is not None,
        )
        self._backward_cost = float(sum(backward_costs)) if backward_costs is not None else 0.0
        smallest, choices = smallest_budget(self._chain)
        if smallest > self.budget_bytes:
            raise BudgetError(
                f"no schedule for these {n} steps fits into {self.budget_bytes} bytes "
                f"({format_bytes(self.budget_bytes)}): the smallest budget that works is {smallest} bytes "
                f"({format_bytes(smallest)}). Raise the budget, or make states or tapes smaller",
                budget_bytes=self.budget_bytes,
                smallest_bytes=smallest,
            )
        limit = levels if levels is not None else max(_MIN_LEVELS, min(1000, _TABLE_ENTRIES // (n + 1) ** 2))
        grid = _all_sums(self._chain, self.budget_bytes, limit)
        self.exact = grid is not None
        """True if the cost is the minimum over persistent schedules, False if it may be slightly higher."""
        if grid is None:
            # Add the sums of the schedule with the smallest peak: rounding up must not make it infeasible.
            even = np.linspace(0, self.budget_bytes, limit).astype(np.int64)
            grid = np.union1d(even, np.array(sums_in_use(self._chain, choices), dtype=np.int64))
        self._grid: _Bytes = grid

    def __repr__(self) -> str:
        return f"heterogeneous({self.n} steps, budget_bytes={self.budget_bytes})"

    @cached_property
    def _cumulative_cost(self) -> _Floats:
        """[i]: the cost of the first i steps, each run once."""
        return np.concatenate([[0.0], np.cumsum(self._costs)])

    @cached_property
    def _table(self) -> _Floats:
        """[start, stop, u]: the minimal cost to reverse these steps while grid[u] bytes hold other values."""
        n, points = self.n, len(self._grid)
        table = np.full((n + 1, n + 1, points + 1), np.inf)  # the last point stands for all sums above the budget
        for start in range(n - 1, -1, -1):
            for stop in range(start + 1, n + 1):
                options = self._options(table, start, stop)
                table[start, stop, :points] = options.min(axis=0)
        return table

    def _options(self, table: _Floats, start: int, stop: int, at: int | None = None) -> _Floats:
        """Return the cost of every first decision, for all grid points or only for the point `at`.

        Row 0: store the tape of `start`, or reverse a single step. Row k: store x_start and advance k steps.
        """
        chain, points = self._chain, len(self._grid)
        selected = slice(0, points) if at is None else slice(at, at + 1)
        used = self._grid[selected]
        fits = used + chain.work[start] + chain.tapes[start] <= self.budget_bytes
        if stop - start == 1:
            return np.where(fits, self._costs[start], np.inf)[None]
        options = np.full((stop - start, len(used)), np.inf)
        if chain.can_store_tapes:
            with_tape = self._grid_index(used, int(chain.tapes[start]))
            after = table[start + 1, stop, with_tape]
            options[0] = np.where(fits, after + self._costs[start], np.inf)
        with_state = self._grid_index(used, int(chain.states[start]))
        rows = options[1:]
        np.take(table[start + 1 : stop, stop], with_state, axis=1, out=rows)
        rows += table[start, start + 1 : stop, selected]
        rows += (self._cumulative_cost[start + 1 : stop] - self._cumulative_cost[start])[:, None]
        if chain.work.any():
            work = np.maximum.accumulate(chain.work[start : stop - 1])
            rows[(used + chain.states[start])[None] + work[:, None] > self.budget_bytes] = np.inf
        return options

    def _grid_index(self, used: _Bytes, extra_bytes: int) -> npt.NDArray[np.intp]:
        """Return the index of the grid point for `used + extra_bytes`, rounded up."""
        return np.searchsorted(self._grid, used + extra_bytes)

    def __iter__(self) -> Iterator[Action]:
        table = self._table
        here, stop, used = 0, self.n, 0
        held: list[tuple[int, int, bool]] = []  # step, grid index before it was stored, True for a tape
        here_is_stored = False
        while True:
            while stop - here > 1:
                k = int(self._options(table, here, stop, used)[:, 0].argmin())
                if not here_is_stored and k:
                    yield Store(here)
                elif here_is_stored and not k:
                    yield Free(here)
                held.append((here, used, k == 0))
                before = self._grid[used : used + 1]
                if k:
                    yield Advance(here, here + k)
                    used = int(self._grid_index(before, int(self._chain.states[here]))[0])
                    here += k
                else:
                    yield Store(here, content="tape")
                    used = int(self._grid_index(before, int(self._chain.tapes[here]))[0])
                    here += 1
                here_is_stored = False
            if here_is_stored:
                yield Free(here)
            yield Reverse(here)
            stop = here
            while held and held[-1][2]:
                stop, _, _ = held.pop()
                yield Reverse(stop, source="tape")
                yield Free(stop, content="tape")
            if not held:
                return
            here, used, _ = held.pop()
            here_is_stored = True
            yield Load(here)

    @cached_property
    def _counts(self) -> tuple[int, int, int]:
        """Forward steps, peak slots and peak bytes, counted over all actions."""
        chain = self._chain
        steps = slots = peak_slots = stored_bytes = peak_bytes = 0
        for action in self:
            live_bytes = stored_bytes
            match action:
                case Advance(start, stop):
                    steps += stop - start
                    live_bytes += int(chain.work[start:stop].max())
                case Reverse(step, "state"):
                    steps += 1
                    live_bytes += int(chain.work[step] + chain.tapes[step])
                case Store(step, _, content):
                    slots += 1
                    if content == "tape":
                        steps += 1
                        live_bytes += int(chain.work[step] + chain.tapes[step])
                    stored_bytes += chain.bytes_of(step, content)
                case Free(step, _, content):
                    slots -= 1
                    stored_bytes -= chain.bytes_of(step, content)
            peak_slots = max(peak_slots, slots)
            peak_bytes = max(peak_bytes, live_bytes, stored_bytes)
        return steps, peak_slots, peak_bytes

    @property
    def forward_steps(self) -> int:
        """Forward steps of the cheapest schedule. A schedule with fewer steps may cost more."""
        return self._counts[0]

    @property
    def peak_slots(self) -> Tiers:
        """Peak number of stored states and tapes."""
        return Tiers(memory=self._counts[1])

    @property
    def peak_bytes(self) -> int:
        """Peak bytes, at most the budget."""
        return self._counts[2]

    @property
    def cost(self) -> float:
        """Cost of all forward steps, with repetitions, and of all backward steps."""
        return float(self._table[0, self.n, 0]) + self._backward_cost


def _all_sums(chain: Chain, budget_bytes: int, limit: int) -> _Bytes | None:
    """Return every possible sum of stored bytes, or None if there are more than `limit`."""
    sums = np.zeros(1, dtype=np.int64)
    sizes = Counter(chain.states[:-2].tolist())
    if chain.can_store_tapes:
        sizes.update(chain.tapes[:-1].tolist())
    for size, count in sizes.items():
        if size == 0:
            continue
        part = 1
        while count > 0:  # add 1, 2, 4, … copies at once: log(count) unions instead of count
            take = min(part, count)
            sums = np.union1d(sums, sums + take * size)
            sums = sums[sums <= budget_bytes]
            if len(sums) > limit:
                return None
            count, part = count - take, part * 2
    return sums


def _check(
    n: int,
    costs: Sequence[float],
    sizes: Sequence[int],
    tape_sizes: Sequence[int] | None,
    work_sizes: Sequence[int] | None,
    backward_costs: Sequence[float] | None,
    levels: int | None,
) -> None:
    if n < 1:
        raise ArgumentError("a chain has at least one step: costs is empty")
    if n > _MAX_STEPS:
        raise ArgumentError(
            f"{n} steps are too many for heterogeneous, which takes n³ operations and accepts up to {_MAX_STEPS}: "
            "merge consecutive steps, or use revolve for equal steps"
        )
    if len(sizes) != n + 1:
        raise ArgumentError(f"{n} steps have {n + 1} states, x_0 to x_{n}, but {len(sizes)} sizes were given")
    named = {"tape_sizes": tape_sizes, "work_sizes": work_sizes, "backward_costs": backward_costs}
    for name, values in named.items():
        if values is not None and len(values) != n:
            raise ArgumentError(f"{name} has {len(values)} entries for {n} steps")
    for name, values in {"costs": costs, "sizes": sizes, **named}.items():
        if values is not None and not all(value >= 0 for value in values):
            raise ArgumentError(f"{name} holds {min(values)}: values must not be negative")
    if levels is not None and levels < 2:
        raise ArgumentError(f"a grid has at least 2 levels, not {levels}")


def heterogeneous(
    costs: Sequence[float],
    sizes: Sequence[int],
    budget_bytes: int | str,
    *,
    tape_sizes: Sequence[int] | None = None,
    work_sizes: Sequence[int] | None = None,
    backward_costs: Sequence[float] | None = None,
    levels: int | None = None,
) -> Heterogeneous:
    """Return the cheapest schedule for unequal steps within `budget_bytes` (an int, or a string such as "4 GiB").

    `costs` has one entry per step, `sizes` one per state, x_0 to x_n. With `tape_sizes`, tapes may be stored,
    and the tape of the step being reversed counts. `work_sizes` are the bytes that each forward step needs
    beside the stored values. `backward_costs` only add to `cost`. `levels` is the number of points in the grid
    of byte counts.
    """
    return Heterogeneous(
        costs,
        sizes,
        budget_bytes,
        tape_sizes=tape_sizes,
        work_sizes=work_sizes,
        backward_costs=backward_costs,
        levels=levels,
    )
