"""The core of the planner as linear rows: at most one recompute per op, bytes at any op and any ask.

Where values may wait elsewhere, `o` is a third choice: in a store, no bytes from forward's last use until it is read
back, which takes time (writes and reads are hidden behind ops as far as there are enough); or packed, fewer bytes.

Variables are shared by *ties*: ops with one tie get one decision, so that repeated blocks make a small
model; without ties every op has its own. `s` (held into backward) is binary; `r` (replayed) and what follows
from both are continuous, because with `s` integral their least values are integral.

Rows are optimistic or safe about what is alive only inside one resolve: optimistic rows leave it out (and are
then valid for this class of plans up to the other approximations below), safe ones count all of it. Neither
is exact; the simulator has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .problem import Problem
from .rows import Event, Floats, Rows


class Formulation:
    """Variables and rows for one problem; rows of bytes are made for one place at a time."""

    def __init__(self, problem: Problem, ties: Sequence[int] | None = None) -> None:
        self.problem = problem
        n = problem.n_ops
        labels = list(range(n)) if ties is None else list(ties)
        self.replayed_at = _replayed_at(problem)
        self.last_wanted = self._find_last_wanted()
        # Only what some saved value is made from can be worth keeping or recomputing.
        self.relevant = [at <= problem.n_unpacks for at in self.replayed_at]
        classes: dict[int, int] = {}
        self.op_class = [classes.setdefault(labels[j], len(classes)) if self.relevant[j] else -1 for j in range(n)]
        self.n_classes = len(classes)
        movable = sorted({self.op_class[j] for j in range(n) if self.relevant[j] and problem.offloadable[j]})
        self._o = {c: 2 * self.n_classes + k for k, c in enumerate(movable)}
        self._first_own = 2 * self.n_classes + len(movable)
        self.n_variables = self._first_own
        self.binary = [*range(self.n_classes), *self._o.values()]
        self.held_variable = self._held_variables()
        self.byte_unit = max(1.0, float(max(problem.nbytes, default=1)) / 1000.0)
        self.time_unit = max(sum(problem.time_s) / 1000.0, 1e-12)
        self._values = np.array([v for v in range(problem.n_values) if self.held_variable[v] >= 0], dtype=np.int64)
        self._held = np.array(self.held_variable, dtype=np.int64)[self._values]
        self._bytes = np.array(problem.nbytes, dtype=np.float64)[self._values] / self.byte_unit
        self._maker = np.array(problem.producer, dtype=np.int64)[self._values]
        self._natural_end = np.array(problem.natural_end, dtype=np.int64)[self._values]
        self._natural_last_unpack = np.array(problem.natural_last_unpack, dtype=np.int64)[self._values]
        self._last_wanted = np.array(self.last_wanted, dtype=np.int64)[self._values]
        self._first_unpack = np.array(problem.first_unpack, dtype=np.int64)[self._values]
        # What is left in memory of saved values that are away, and the variables that say so; mostly nothing.
        resting = [
            problem.residual_bytes(int(v)) if problem.offloadable[problem.producer[v]] and problem.saved[v] else 0
            for v in self._values
        ]
        self._resting = np.array(resting, dtype=np.float64) / self.byte_unit
        self._away = np.array(
            [self.o(problem.producer[v]) if rests else 0 for v, rests in zip(self._values, resting, strict=True)],
            dtype=np.int64,
        )
        self._natural_forward, self._natural_backward = _natural_bytes(problem)
        self._settle_certain()

    def s(self, op: int) -> int:
        """The variable "op is held"."""
        return self.op_class[op]

    def r(self, op: int) -> int:
        """The variable "op is replayed"."""
        return self.n_classes + self.op_class[op]

    def o(self, op: int) -> int:
        """The variable "what op makes waits elsewhere", of ops for which there is that choice."""
        return self._o[self.op_class[op]]

    def there(self, op: int) -> dict[int, float]:
        """ "op is held, or elsewhere": without being replayed, it can be had."""
        return {self.s(op): 1.0, **({self.o(op): 1.0} if self.problem.offloadable[op] else {})}

    def cost(self) -> Floats:
        """Time that replays, offloading and compressing take at least, in units of `time_unit`."""
        problem = self.problem
        cost = np.zeros(self.n_variables)
        for j in range(problem.n_ops):
            if self.relevant[j]:
                cost[self.r(j)] += problem.replay_overhead_s[j] / self.time_unit
                if problem.offloadable[j]:
                    cost[self.o(j)] += self.move_s(j) / self.time_unit
        return cost

    def move_s(self, op: int) -> float:
        """What it takes at least that op's values wait elsewhere."""
        problem, link = self.problem, self.problem.link
        if problem.packed[op]:
            asked = [v for v in problem.moved(op) if problem.saved[v] and problem.last_unpack[v] >= 0]
            trips = [
                codec_cost.compression_s(problem.nbytes[v]) + codec_cost.decompression_s(problem.nbytes[v])
                for v in asked or problem.moved(op)
                if (codec_cost := problem.codec_cost[v]) is not None
            ]
            return sum(trips) if asked else min(trips)
        assert link is not None
        moved = self._moved_bytes(op)
        return link.put_slowdown_s(moved) + min(link.blocking_fetch_s(moved), link.prefetch_slowdown_s(moved))

    def waiting_rows(self, rows: Rows, new: Callable[[], int]) -> list[tuple[int, float]]:
        """Forward hides as much writing, and backward as much reading ahead, as they take time themselves.

        The rest is waited for: variables and their units. Not for lower bounds, as what is not read ahead is not in it.
        """
        problem, link = self.problem, self.problem.link
        if link is None or not self._o:
            return []
        moved = {
            j: self._moved_bytes(j)
            for j in range(problem.n_ops)
            if self.relevant[j] and problem.offloadable[j] and not problem.packed[j]
        }
        writing = {j: link.write_s(nbytes) for j, nbytes in moved.items()}
        reading = {j: link.prefetch_read_s(nbytes) for j, nbytes in moved.items() if link.prefetch_pays(nbytes)}
        backward_s = sum(unpack.time_s for unpack in problem.trace.unpacks)
        replays = {self.r(j): 0.0 for j in range(problem.n_ops) if self.relevant[j]}
        for j in range(problem.n_ops):
            if self.relevant[j]:
                replays[self.r(j)] -= problem.replay_overhead_s[j]
        waited = []
        for busy, beside_s, replaying in ((writing, sum(problem.time_s), {}), (reading, backward_s, replays)):
            all_s = sum(busy.values())
            if not all_s:  # there is nothing to wait for
                continue
            waited.append((new(), all_s))
            terms = [*((self.o(j), seconds) for j, seconds in busy.items()), *replaying.items()]
            scaled = [(variable, seconds / all_s) for variable, seconds in terms]
            rows.add(_sum([*scaled, (waited[-1][0], -1.0)]), -np.inf, beside_s / all_s)
        return waited

    def _moved_bytes(self, op: int) -> int:
        """What is written and read at least if op is offloaded: what is asked for, or one value if none is."""
        problem = self.problem
        asked = [problem.nbytes[v] for v in problem.outputs[op] if problem.saved[v] and problem.last_unpack[v] >= 0]
        return sum(asked) or min(problem.nbytes[v] for v in problem.outputs[op])

    def upper(self) -> Floats:
        """Upper bounds: nothing pinned is replayed."""
        upper = np.ones(self.n_variables)
        for j in range(self.problem.n_ops):
            if self.relevant[j] and self.problem.pinned[j]:
                upper[self.r(j)] = 0.0
        return upper

    def structure(self, rows: Rows, *, after: int | None = None) -> None:
        """What is saved is held or replayed; so is what a replay reads. What is written over held memory is held.

        `after` an ask (-1: all of backward), for lower bounds: only what is asked for later, from what is there
        then. What is never asked for may be neither held nor replayed.
        """
        problem = self.problem
        for j in range(problem.n_ops):
            if not self.relevant[j]:
                continue
            if any(
                problem.saved[v] and (after is None or (problem.last_unpack[v] > after and not self.answered(v, after)))
                for v in problem.outputs[j]
            ):
                rows.add(self.there(j) | {self.r(j): 1.0}, 1.0, np.inf)
            if problem.pinned[j]:
                continue
            for i in problem.over[j]:
                # What is written over memory that is held cannot be made again.
                rows.add({self.s(i): 1.0, self.r(j): 1.0} if i >= 0 else {self.r(j): 1.0}, -np.inf, float(i >= 0))
            for u in problem.inputs[j]:
                producer = problem.producer[u]
                if after is not None and self.answered(u, after):
                    continue
                if self.s(producer) != self.s(j):
                    rows.add(self.there(producer) | {self.r(producer): 1.0, self.r(j): -1.0}, 0.0, np.inf)
                held = self.held_variable[u]
                if held >= self._first_own:
                    rows.add(_sum([(held, 1.0), (self.s(producer), -1.0), (self.r(j), -1.0)]), -1.0, np.inf)

    def bytes_row(
        self, rows: Rows, place: Event, budget: float, *, safe: bool, reach: int, new: Callable[[], int]
    ) -> None:
        """All bytes alive at `place` fit into `budget`. `reach`: how many asks ahead a replay may reach."""
        if place.phase == "forward":
            terms, fixed = self._forward_terms(place.index)
        else:
            terms, inside, fixed = self._ask_terms(rows, place.index, reach, new)
            if safe:  # what is alive inside the resolve is there before the node makes anything
                rise = self.problem.rise_bytes[place.index]
                rows.add(_sum([*terms.items(), *inside]), -np.inf, (budget - fixed + rise) / self.byte_unit)
        rows.add(terms, -np.inf, (budget - fixed) / self.byte_unit)

    def held_terms(self, place: Event) -> tuple[dict[int, float], float]:
        """What is held at `place` whatever the replays do, and the bytes that no decision changes."""
        if place.phase == "forward":
            return self._forward_terms(place.index)
        k = place.index
        alive = (self._last_wanted >= k) & (self._natural_last_unpack < k)
        fixed = self.problem.trace.unpacks[k].other_bytes + self._natural_backward[k]
        return self._summed(alive, alive & (self._first_unpack > k)), float(fixed)

    def certain_terms(self, place: Event) -> tuple[dict[int, float], float]:
        """Like `held_terms`, but only what no exact schedule can avoid: for lower bounds."""
        if place.phase == "forward":
            return self._forward_terms(place.index)
        k = place.index
        starts, ends = self._certainly_held
        terms = self._summed((starts <= k) & (k <= ends) & (self._natural_last_unpack < k))
        fixed = self.problem.trace.unpacks[k].other_bytes + self._natural_backward[k]
        return terms, float(fixed + self._answered_bytes[k])

    def state_terms(self, k: int) -> tuple[dict[int, float], float]:
        """What is there once ask k has been answered, if `s` says just that: for lower bounds, with `after=k`."""
        problem = self.problem
        answered = np.array([self.answered(int(v), k) for v in self._values], dtype=bool)
        terms = self._summed(~answered & (self._natural_last_unpack < k))
        fixed = problem.trace.unpacks[k].other_bytes + self._natural_backward[k] + self._answered_bytes[k]
        return terms, float(fixed)

    def answered(self, v: int, k: int) -> bool:
        """Whether v has been asked for by ask k, and its handle is still there."""
        return self.problem.saved[v] and self.problem.first_unpack[v] <= k <= self.problem.handle_end[v]

    def certain_bytes(self, x: Floats) -> tuple[Floats, Floats]:
        """By op and by ask: what the rows of `certain_terms` come to for a solution."""
        problem = self.problem
        held = (x[self._held] * self._bytes + x[self._away] * self._resting) * self.byte_unit
        forward = np.zeros(problem.n_ops + 1)
        start = np.maximum(self._maker, self._natural_end + 1)
        np.add.at(forward, np.minimum(start, problem.n_ops), held)
        forward_other = np.array([op.other_bytes for op in problem.trace.ops]) + self._natural_forward[: problem.n_ops]
        backward = np.zeros(problem.n_unpacks + 2)
        starts, ends = self._certainly_held
        starts = np.maximum(starts, self._natural_last_unpack + 1)
        some = starts <= ends
        np.add.at(backward, np.minimum(starts[some], problem.n_unpacks), held[some])
        np.subtract.at(backward, np.minimum(ends[some], problem.n_unpacks) + 1, held[some])
        backward_other = np.array([unpack.other_bytes for unpack in problem.trace.unpacks], dtype=float)
        backward_other += self._natural_backward[: problem.n_unpacks] + self._answered_bytes[: problem.n_unpacks]
        return (
            np.cumsum(forward)[: problem.n_ops] + forward_other,
            np.cumsum(backward)[: problem.n_unpacks] + backward_other,
        )

    def _settle_certain(self) -> None:
        """What is held for sure: into the first ask, and what is saved until it has first been asked for.

        From then until its handle is gone it is there whether it was held or replayed: bytes of no decision.
        """
        problem = self.problem
        answered = np.zeros(problem.n_unpacks + 2)
        starts = np.zeros(problem.n_values, dtype=np.int64)
        ends = np.zeros(problem.n_values, dtype=np.int64)
        for v in range(problem.n_values):
            if problem.saved[v]:
                ends[v] = min(problem.first_unpack[v], problem.n_unpacks) - 1
                # What lives until backward anyway is there without us.
                first = max(problem.first_unpack[v], problem.natural_last_unpack[v] + 1)
                if first <= problem.handle_end[v] and problem.first_unpack[v] < problem.n_unpacks:
                    answered[first] += problem.nbytes[v]
                    answered[min(problem.handle_end[v], problem.n_unpacks) + 1] -= problem.nbytes[v]
        self._certainly_held = (starts[self._values], ends[self._values])
        self._answered_bytes: Floats = np.cumsum(answered)

    def _forward_terms(self, j: int) -> tuple[dict[int, float], float]:
        alive = (self._maker <= j) & (self._natural_end < j)
        return self._summed(alive), float(self.problem.trace.ops[j].other_bytes + self._natural_forward[j])

    def _ask_terms(
        self, rows: Rows, k: int, reach: int, new: Callable[[], int]
    ) -> tuple[dict[int, float], list[tuple[int, float]], float]:
        """The bytes at ask k, those that are there only while it is answered, and those of no decision.

        With new variables for ops that may have been replayed before they are asked.
        """
        problem = self.problem
        terms, fixed = self.held_terms(Event("unpack", k))
        inside: list[tuple[int, float]] = []
        early: dict[int, int] = {}
        back: dict[int, int] = {}  # by value: the variable "it has been read from the store for a replay"

        def done(op: int) -> int:
            """The variable "op has been replayed by ask k", or -1 where it cannot have been."""
            if self._asked_by(op, k):
                return self.r(op)
            return early.get(op, -1)

        def count_if_wanted(variable: int, v: int) -> None:
            """What a variable stands for has v in memory at ask k, if anybody wants it then."""
            wanted, units = self.last_wanted[v], problem.nbytes[v] / self.byte_unit
            if wanted > k or (wanted == k and problem.saved[v]):
                terms[variable] = terms.get(variable, 0.0) + units
            elif wanted == k:
                inside.append((variable, units))

        for w in range(problem.n_ops - 1, -1, -1):
            if not self.relevant[w] or problem.pinned[w]:
                continue
            variable = done(w)
            if variable < 0:
                continue
            for u in problem.inputs[w]:
                op = problem.producer[u]
                if problem.offloadable[op] and problem.first_unpack[u] > k:
                    if u not in back:
                        back[u] = new()
                    rows.add(_sum([(back[u], 1.0), (variable, -1.0), (self.o(op), -1.0)]), -1.0, np.inf)
                if problem.pinned[op] or self._asked_by(op, k) or self.replayed_at[op] > k + reach:
                    continue
                if op not in early:
                    early[op] = new()
                there = [(c, 1.0) for c in self.there(op)]
                rows.add(_sum([(early[op], 1.0), (variable, -1.0), *there]), 0.0, np.inf)
            for v in problem.outputs[w]:
                count_if_wanted(variable, v)
        for v, variable in back.items():
            count_if_wanted(variable, v)
        for j in range(problem.n_ops):
            if self.relevant[j] and problem.offloadable[j]:
                for v in problem.outputs[j]:
                    if problem.first_unpack[v] <= k:
                        count_if_wanted(self.o(j), v)
        return terms, inside, fixed

    def _asked_by(self, op: int, k: int) -> bool:
        return any(self.problem.first_unpack[v] <= k for v in self.problem.outputs[op])

    def _summed(self, alive: npt.NDArray[np.bool_], resting: npt.NDArray[np.bool_] | None = None) -> dict[int, float]:
        """The bytes of these values where they are held, and of those `resting` (all) where they are away."""
        totals = np.bincount(self._held[alive], weights=self._bytes[alive], minlength=self.n_variables)
        resting = alive if resting is None else resting
        totals += np.bincount(self._away[resting], weights=self._resting[resting], minlength=self.n_variables)
        return {int(c): float(totals[c]) for c in np.flatnonzero(totals)}

    def _held_variables(self) -> list[int]:
        """By value: the variable that says that it is held.

        A kept op with several outputs holds only those that are saved or read by a replay; the others get a
        variable of their own. A lone output is kept for a purpose or not at all.
        """
        problem = self.problem
        variables = [-1] * problem.n_values
        own: dict[tuple[int, int], int] = {}
        for j in range(problem.n_ops):
            if not self.relevant[j]:
                continue
            for position, v in enumerate(problem.outputs[j]):
                if problem.saved[v] or len(problem.outputs[j]) == 1:
                    variables[v] = self.s(j)
                elif any(self.relevant[w] and not problem.pinned[w] for w in problem.consumers[v]):
                    key = (self.op_class[j], position)
                    if key not in own:
                        own[key] = self.n_variables
                        self.n_variables += 1
                    variables[v] = own[key]
        return variables

    def _find_last_wanted(self) -> list[int]:
        """By value: the last ask at which it can still be wanted, by its handle or by a replay that reads it."""
        problem = self.problem
        last = []
        for v in range(problem.n_values):
            ends = [problem.handle_end[v]] if problem.saved[v] else [-1]
            ends += [self.replayed_at[w] for w in problem.consumers[v] if self.replayed_at[w] <= problem.n_unpacks]
            last.append(max(ends))
        return last


def _replayed_at(problem: Problem) -> list[int]:
    """By op: the ask by which it has been replayed if it is at all; beyond all asks: nothing saved is made from it.

    What is saved is replayed at its first ask at the latest, anything else for the last of its readers.
    """
    never = problem.n_unpacks + 1
    at = [never] * problem.n_ops
    for j in range(problem.n_ops - 1, -1, -1):
        asked = [problem.first_unpack[v] for v in problem.outputs[j] if problem.saved[v]]
        if asked:
            at[j] = min(asked)
        else:
            readers = [at[w] for v in problem.outputs[j] for w in problem.consumers[v] if not problem.pinned[w]]
            at[j] = max((reader for reader in readers if reader < never), default=never)
    return at


def _natural_bytes(problem: Problem) -> tuple[Floats, Floats]:
    """Bytes of values that are alive whatever is decided, by op and by ask."""
    forward = np.zeros(problem.n_ops + 2)
    backward = np.zeros(problem.n_unpacks + 2)
    for v in range(problem.n_values):
        if problem.producer[v] < 0:
            continue
        forward[problem.producer[v]] += problem.nbytes[v]
        forward[min(problem.natural_end[v], problem.n_ops) + 1] -= problem.nbytes[v]
        if problem.natural_last_unpack[v] >= 0:
            backward[0] += problem.nbytes[v]
            backward[min(problem.natural_last_unpack[v], problem.n_unpacks) + 1] -= problem.nbytes[v]
    return np.cumsum(forward), np.cumsum(backward)


def _sum(terms: list[tuple[int, float]]) -> dict[int, float]:
    total: dict[int, float] = {}
    for variable, coefficient in terms:
        total[variable] = total.get(variable, 0.0) + coefficient
    return {variable: coefficient for variable, coefficient in total.items() if coefficient}
