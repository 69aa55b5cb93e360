"""The cheapest schedule for steps of unequal cost and states of unequal size, within a budget in bytes.

Paper: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly and A. Shilova, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory" (2019), known as rotor.

What is counted against the budget: at every moment the bytes of all stored states and tapes; while the
forward step i runs also `work_sizes[i]`; while step i is taped, by `Reverse` from a state or to be stored,
also `tape_sizes[i]`. The working state counts only as far as `work_sizes` says so.

Guarantee: the budget is never exceeded, and the cost is the least among *memory-persistent* schedules: what
was stored stays until the reverse sweep has used it (a state may be exchanged for the tape of its own
step), and meanwhile no step before it is run again. The bytes in use are taken from a grid.
Where the stored sizes have no more than `levels` distinct sums within the budget the grid holds them all
and the optimum is exact; otherwise sums are rounded up to the next of about `levels` points, so that the
schedule may cost a little more than it could, but fits. `BudgetError` is raised if and only if no
persistent schedule fits, and names the smallest budget for which one does.

Shortfall: time O(n³·levels) and memory O(n²·levels): chains of a few hundred steps. A schedule that is not
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
from ._smallest import Chain, smallest_budget, sums_in_use

_Floats = npt.NDArray[np.float64]
_Bytes = npt.NDArray[np.int64]
_TABLE_ENTRIES = 2**24
"""How large the table of costs may become (128 MiB) before the grid is made coarser."""
_FEWEST_LEVELS = 50
"""How coarse the grid may become before the table is allowed to grow instead."""
_MOST_STEPS = 1500
"""Longer chains would take a table of more than a gigabyte."""


class Heterogeneous(Schedule):
    """What `heterogeneous` returns."""

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
            tapes_can_wait=tape_sizes is not None,
        )
        self._backward_cost = float(sum(backward_costs)) if backward_costs is not None else 0.0
        smallest, choices = smallest_budget(self._chain)
        if smallest > self.budget_bytes:
            raise BudgetError(
                f"no schedule for these {n} steps fits into {self.budget_bytes} bytes "
                f"({format_bytes(self.budget_bytes)}): the least is {smallest} bytes "
                f"({format_bytes(smallest)}), with as little stored as can be; raise the budget, or make the "
                "states (or the tapes) smaller",
                budget_bytes=self.budget_bytes,
                smallest_bytes=smallest,
            )
        limit = levels if levels is not None else max(_FEWEST_LEVELS, min(1000, _TABLE_ENTRIES // (n + 1) ** 2))
        grid = _all_sums(self._chain, self.budget_bytes, limit)
        self.exact = grid is not None
        """Whether the cost is the least of its class, not only near it."""
        if grid is None:
            # The sums of the thriftiest schedule are on the grid, so that what fits is never lost in rounding.
            even = np.linspace(0, self.budget_bytes, limit).astype(np.int64)
            grid = np.union1d(even, np.array(sums_in_use(self._chain, choices), dtype=np.int64))
        self._grid: _Bytes = grid

    def __repr__(self) -> str:
        return f"heterogeneous({self.n} steps, budget_bytes={self.budget_bytes})"

    @cached_property
    def _until(self) -> _Floats:
        """The cost of the first i steps, each once."""
        return np.concatenate([[0.0], np.cumsum(self._costs)])

    @cached_property
    def _table(self) -> _Floats:
        """[start, stop, u]: the least cost of reversing these steps with grid[u] bytes in use elsewhere."""
        n, points = self.n, len(self._grid)
        table = np.full((n + 1, n + 1, points + 1), np.inf)  # at the last point the budget is exceeded
        for start in range(n - 1, -1, -1):
            for stop in range(start + 1, n + 1):
                options = self._options(table, start, stop)
                table[start, stop, :points] = options.min(axis=0)
        return table

    def _options(self, table: _Floats, start: int, stop: int, at: int | None = None) -> _Floats:
        """Costs of every first decision, for all points of the grid or only for one.

        Row 0: the tape of `start` (for a single step: reverse it). Row k: store x_start and go on k steps.
        """
        chain, points = self._chain, len(self._grid)
        some = slice(0, points) if at is None else slice(at, at + 1)
        used = self._grid[some]
        fits = used + chain.work[start] + chain.tapes[start] <= self.budget_bytes
        if stop - start == 1:
            return np.where(fits, self._costs[start], np.inf)[None]
        options = np.full((stop - start, len(used)), np.inf)
        if chain.tapes_can_wait:
            with_tape = self._next(used, int(chain.tapes[start]))
            after = table[start + 1, stop, with_tape]
            options[0] = np.where(fits, after + self._costs[start], np.inf)
        with_state = self._next(used, int(chain.states[start]))
        rows = options[1:]
        np.take(table[start + 1 : stop, stop], with_state, axis=1, out=rows)
        rows += table[start, start + 1 : stop, some]
        rows += (self._until[start + 1 : stop] - self._until[start])[:, None]
        if chain.work.any():
            work = np.maximum.accumulate(chain.work[start : stop - 1])
            rows[(used + chain.states[start])[None] + work[:, None] > self.budget_bytes] = np.inf
        return options

    def _next(self, used: _Bytes, more: int) -> npt.NDArray[np.intp]:
        """The point of the grid for `more` bytes beside what is in use, rounded up."""
        return np.searchsorted(self._grid, used + more)

    def __iter__(self) -> Iterator[Action]:
        table = self._table
        here, stop, used = 0, self.n, 0
        held: list[tuple[int, int, bool]] = []  # a step, what was in use before it was stored, whether a tape
        again = False
        while True:
            while stop - here > 1:
                k = int(self._options(table, here, stop, used)[:, 0].argmin())
                if not again and k:
                    yield Store(here)
                elif again and not k:
                    yield Free(here)
                held.append((here, used, k == 0))
                before = self._grid[used : used + 1]
                if k:
                    yield Advance(here, here + k)
                    used = int(self._next(before, int(self._chain.states[here]))[0])
                    here += k
                else:
                    yield Store(here, what="tape")
                    used = int(self._next(before, int(self._chain.tapes[here]))[0])
                    here += 1
                again = False
            if again:
                yield Free(here)
            yield Reverse(here)
            stop = here
            while held and held[-1][2]:
                stop, _, _ = held.pop()
                yield Reverse(stop, source="tape")
                yield Free(stop, what="tape")
            if not held:
                return
            here, used, _ = held.pop()
            again = True
            yield Load(here)

    @cached_property
    def _counted(self) -> tuple[int, int, int]:
        """Forward steps, most slots and most bytes, by going through the actions once."""
        chain = self._chain
        steps = slots = most_slots = nbytes = most_bytes = 0
        for action in self:
            need = nbytes
            match action:
                case Advance(start, stop):
                    steps += stop - start
                    need += int(chain.work[start:stop].max())
                case Reverse(step, "state"):
                    steps += 1
                    need += int(chain.work[step] + chain.tapes[step])
                case Store(step, _, what):
                    slots += 1
                    if what == "tape":
                        steps += 1
                        need += int(chain.work[step] + chain.tapes[step])
                    nbytes += chain.bytes_of(step, what)
                case Free(step, _, what):
                    slots -= 1
                    nbytes -= chain.bytes_of(step, what)
            most_slots = max(most_slots, slots)
            most_bytes = max(most_bytes, need, nbytes)
        return steps, most_slots, most_bytes

    @property
    def forward_steps(self) -> int:
        """Of the schedule of least cost; one with fewer steps may cost more."""
        return self._counted[0]

    @property
    def peak_slots(self) -> Tiers:
        """How many states and tapes are stored at one time."""
        return Tiers(memory=self._counted[1])

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at one time, never more than the budget."""
        return self._counted[2]

    @property
    def cost(self) -> float:
        """The forward steps, each as often as it runs, and the backward steps."""
        return float(self._table[0, self.n, 0]) + self._backward_cost


def _all_sums(chain: Chain, budget_bytes: int, limit: int) -> _Bytes | None:
    """Every sum of bytes that could be in use, or None where there are more than `limit` of them."""
    sums = np.zeros(1, dtype=np.int64)
    sizes = Counter(chain.states[:-2].tolist())
    if chain.tapes_can_wait:
        sizes.update(chain.tapes[:-1].tolist())
    for size, count in sizes.items():
        if size == 0:
            continue
        part = 1
        while count > 0:  # 1, 2, 4, … of them at once: log(count) unions instead of count
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
    if n > _MOST_STEPS:
        raise ArgumentError(
            f"{n} steps are too many for this programme, which takes n³ operations; up to {_MOST_STEPS} are "
            "accepted: join neighbouring steps into one, or use revolve if they are alike"
        )
    if len(sizes) != n + 1:
        raise ArgumentError(f"{n} steps have {n + 1} states, x_0 to x_{n}, but {len(sizes)} sizes were given")
    named = {"tape_sizes": tape_sizes, "work_sizes": work_sizes, "backward_costs": backward_costs}
    for name, values in named.items():
        if values is not None and len(values) != n:
            raise ArgumentError(f"{name} has {len(values)} entries for {n} steps")
    for name, values in {"costs": costs, "sizes": sizes, **named}.items():
        if values is not None and not all(value >= 0 for value in values):
            raise ArgumentError(f"{name} holds {min(values)}: nothing here may be negative")
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
    """The cheapest schedule for unequal steps within `budget_bytes` (bytes, or a string such as "4 GiB").

    `costs` has one entry a step, `sizes` one a state, x_0 to x_n. With `tape_sizes` tapes may be stored too,
    and the tape of the step being reversed counts. `work_sizes` is what each forward step needs beside what
    is stored, `backward_costs` only adds to `cost`, `levels` is the fineness of the grid of bytes.
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
