"""Backward, as the simulator follows it: what is in memory from ask to ask, and what is replayed or read for each.

It does what the engine does at an ask: makes what is missing by replaying it, op by op, retaining what somebody still
wants; reads back what is in the store, also ahead of its ask; and lets go of whatever nobody wants any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from .._errors import LowtideError
from ..records.plan import WHEN_BACKWARD_BEGINS
from .prefetch import Fetch, PrefetchQueue
from .problem import Problem


class TooManyReplaysError(LowtideError):
    """A simulation was cut short: the decisions replay more ops than the caller is willing to follow."""


class Watcher(Protocol):
    """Follows backward: whose bytes come and go, and each moment at which they are counted."""

    def change(self, value: int, ours: int, others: int) -> None:
        """By how many (-1, 0, 1) the copies of a value change that we hold, and that others hold."""

    def waits(self, seconds: float) -> None:
        """The step waits for the store."""

    def decompresses(self, unpack: int, value: int, seconds: float, scratch_bytes: int) -> None:
        """A value is being unpacked for this ask."""

    def decompressed(self, value: int, compressed_bytes: int) -> None:
        """A value is no longer held packed."""

    def moment(self, unpack: int, replayed: int | None, scratch_bytes: int) -> None:
        """An op is being replayed for this ask, with results that nobody wants; or (None) the ask is answered."""


class Backward:
    """The state of backward between two asks."""

    def __init__(
        self,
        problem: Problem,
        keep: Sequence[int | bool],
        released: frozenset[int],
        wanted_until: list[int],
        max_replays: int | None,
        away: Sequence[int],
        prefetch_after: Mapping[int, int],
    ) -> None:
        n = problem.n_ops
        self.problem = problem
        self._keep = keep
        self._again = released  # recomputed ops whose values are released after use
        self.extra_s = self.store_wait_s = 0.0
        self.replayed_ops = 0
        self.replays = [0] * n
        self.watching = False
        self.seen: list[int] = []
        self.watcher: Watcher | None = None
        self.prefetch_after = prefetch_after
        self.fetches: list[Fetch] = []
        self.answers: list[int] = []
        """By ask: the most bytes of ours alive."""
        self.begun_bytes = 0
        """Of what is read from the beginning on."""
        self._reading = PrefetchQueue(problem, away, prefetch_after)
        self._own_s = 0.0  # what it has taken, without waiting for the store
        self._most_bytes = 0  # since the last fetch, of everybody
        self._limit = max_replays
        self._resident = [False] * problem.n_values
        self._answered = [False] * problem.n_values  # asked for, and its handle not yet gone
        self._natural = [False] * problem.n_values  # alive without us, and not resident
        self._leaves_after: dict[int, list[int]] = {}  # by ask: natural values that go after it
        self._stays_until: dict[int, int] = {}  # resident values that are alive until that ask anyway
        self._ask = 0
        self._noted_bytes = -math.inf
        # Handles and recipes not yet run that want a value.
        self._wants = [1 if saved else 0 for saved in problem.saved]
        self._recipe = [False] * n
        self._live = 0
        self._pushes: dict[int, int] = {}  # in the resolve at hand: ops that wait for a value
        self._away = frozenset(away)  # in the store, which is left alone by reading, or packed
        self._packed = {v: problem.residual_bytes(v) for v in away if problem.codec_cost[v] is not None}
        self._live += sum(self._packed.values())
        for j in range(n):
            if not keep[j] and any(wanted_until[v] >= n for v in problem.outputs[j]):
                self._recipe[j] = True
                for v in problem.inputs[j]:
                    self._wants[v] += 1
        for v in range(problem.n_values):
            producer = problem.producer[v]
            if producer < 0:
                continue
            if v in self._away:
                continue
            if keep[producer] and self._wants[v]:
                self._resident[v] = True
                self._live += problem.nbytes[v]
                if problem.natural_last_unpack[v] >= 0:
                    self._stays_until[v] = problem.natural_last_unpack[v]
            elif problem.natural_last_unpack[v] >= 0:
                self._stay_on(v)
                self._live += problem.nbytes[v]

    def follow(self) -> None:
        """All of it."""
        self.begin()
        self.answers = [self.answer(k) for k in range(self.problem.n_unpacks)]

    def begin(self) -> None:
        """Backward begins."""
        before = self._live
        self._read_ahead(WHEN_BACKWARD_BEGINS)
        self.begun_bytes = self._live - before

    def answer(self, k: int) -> int:
        """Answer ask k; the most bytes of ours alive beside the most of others, which come when it is answered."""
        problem = self.problem
        self._ask = k
        most = self._live
        self._saw(most)
        if self.watching:
            self._note(-problem.rise_bytes[k])
        v = problem.unpack_value[k]
        if problem.producer[v] >= 0:
            self._answered[v] = True
            if not self._resident[v]:
                most = max(most, self._make(v))
        most = max(most - problem.rise_bytes[k], self._live)
        if self.watching:
            self._note()
        if self.watcher is not None:
            self.watcher.moment(k, None, 0)
        for gone in problem.freed_after[k]:
            self._answered[gone] = False
            self._release(gone)
            if problem.producer[gone] in self._again:
                self._drop(gone)
        for gone in self._leaves_after.pop(k, ()):
            self._natural[gone] = False
            self._live -= problem.nbytes[gone]
            if self.watcher is not None:
                self.watcher.change(gone, 0, -1)
        self._goes_on(problem.trace.unpacks[k].time_s)
        return most

    def _make(self, wanted: int) -> int:
        """Give `wanted` its memory by replaying whatever is missing on the way to it."""
        problem, resident = self.problem, self._resident
        waiting_for: dict[int, list[int]] = {}  # by op: what was pushed for it
        pending = [wanted]
        most = self._live
        while pending:
            v = pending[-1]
            if resident[v]:
                pending.pop()
                continue
            if v in self._away:
                most = max(most, self._read(v))
                pending.pop()
                continue
            op = problem.producer[v]
            missing = [u for u in problem.inputs[op] if not resident[u]]
            if missing:
                waiting_for[op] = missing
                for u in missing:
                    self._pushes[u] = self._pushes.get(u, 0) + 1
                pending.extend(missing)
                continue
            most = max(most, self._replay(op))
            for u in waiting_for.pop(op, ()):
                self._pushes[u] -= 1
                if not self._pushes[u]:
                    del self._pushes[u]
                    if problem.producer[u] in self._again:
                        self._drop_unless_answered(u)
            pending.pop()
        return most

    def _read(self, v: int) -> int:
        """Bring a value back from the store, or unpack it; the live bytes meanwhile."""
        codec_cost, nbytes = self.problem.codec_cost[v], self.problem.nbytes[v]
        if codec_cost is None:
            return self._fetch(v)
        seconds, work = codec_cost.decompression_s(nbytes), codec_cost.workspace_bytes(nbytes)
        self.extra_s += seconds
        self.store_wait_s += seconds
        self._goes_on(seconds)
        self._resident[v] = True
        self._live += nbytes
        if self.watching:
            self._note(work - self.problem.rise_bytes[self._ask])
        if self.watcher is not None:
            self.watcher.change(v, 1, 0)
            self.watcher.decompresses(self._ask, v, seconds, work)
        meanwhile = self._live + work
        self._saw(meanwhile)
        self._unpacked(v)
        return meanwhile

    def _fetch(self, v: int) -> int:
        """Have a value from the store, and begin to read what is due then; the live bytes meanwhile."""
        self.fetches.append(Fetch(v, self._own_s, self._most_bytes))
        is_there = self._reading.is_begun(v)
        self._waits(self._reading.fetch(v))
        self._resident[v] = True
        if not is_there:
            self._live += self.problem.nbytes[v]
            if self.watcher is not None:
                self.watcher.change(v, 1, 0)
        self._read_ahead(self.problem.producer[v])
        if self.watching:
            self._note(-self.problem.rise_bytes[self._ask])
        self._most_bytes = 0
        self._saw(self._live)
        return self._live

    def _read_ahead(self, event: int) -> None:
        """Begin to read what is due, as far as it is still wanted and not there yet."""
        for v in self._reading.due_after(event):
            if self._wants[v] and not self._resident[v]:
                self._waits(self._reading.begin(v))
                self._live += self.problem.nbytes[v]
                if self.watcher is not None:
                    self.watcher.change(v, 1, 0)

    def _waits(self, seconds: float) -> None:
        """For the store, or for the ops that it slows down."""
        self.extra_s += seconds
        self.store_wait_s += seconds
        if self.watcher is not None and seconds:
            self.watcher.waits(seconds)

    def _goes_on(self, seconds: float) -> None:
        """Something runs beside which reads go on."""
        self._own_s += seconds
        self._reading.goes_on(seconds)

    def _saw(self, live: int) -> None:
        """So many bytes of ours are alive."""
        self._most_bytes = max(self._most_bytes, live + self.problem.trace.unpacks[self._ask].other_bytes)

    def _unpacked(self, v: int) -> None:
        """What is held of it packed goes."""
        compressed_bytes = self._packed.pop(v, 0)
        self._live -= compressed_bytes
        if compressed_bytes and self.watcher is not None:
            self.watcher.decompressed(v, compressed_bytes)

    def _replay(self, op: int) -> int:
        """Run one op whose inputs are all there; the live bytes while it ran."""
        problem, resident, wants = self.problem, self._resident, self._wants
        assert self._recipe[op], "an op was forgotten that is still needed"
        self.replayed_ops += 1
        self.replays[op] += 1
        if self._limit is not None and self.replayed_ops > self._limit:
            raise TooManyReplaysError(f"more than {self._limit} replays")
        self.extra_s += problem.replay_overhead_s[op]
        self._goes_on(problem.replay_overhead_s[op])
        released = op in self._again
        for_good = not released
        scratch = 0
        made = [v for v in problem.outputs[op] if wants[v] and not resident[v]]
        for write in problem.writes[op]:
            if write.old is None:
                continue
            if write.exclusive and ((wants[write.old] == 1 and for_good) or self._goes_anyway(write.old)):
                # Its memory becomes the new value's (Rule 6).
                resident[write.old] = False
                self._live -= problem.nbytes[write.old]
                if self.watcher is not None:
                    self.watcher.change(write.old, -1, 0)
            if write.new not in made:
                scratch += problem.nbytes[write.old]
        written = {write.new for write in problem.writes[op]}
        # The op makes all its results, also those that nobody wants (any more): they go as soon as it has run.
        scratch += sum(problem.nbytes[v] for v in problem.outputs[op] if v not in made and v not in written)
        for v in made:
            resident[v] = True
            self._live += problem.nbytes[v]
        if self.watching:
            self._note(scratch - problem.rise_bytes[self._ask])
        if self.watcher is not None:
            for v in made:
                self.watcher.change(v, 1, 0)
            self.watcher.moment(self._ask, op, scratch)
        during = self._live + scratch
        self._saw(during)
        if released:
            for v in made:
                if v not in self._pushes:
                    self._drop_unless_answered(v)
        elif for_good:
            self._forget(op)
        return during

    def _goes_anyway(self, v: int) -> bool:
        """Whether it was made for the op that is replayed now, and does not rest."""
        return self.problem.producer[v] in self._again and self._pushes.get(v) == 1 and not self._answered[v]

    def _forget(self, op: int) -> None:
        """The recipe is gone, and with it what only it wanted."""
        problem = self.problem
        forgotten = [op]
        self._recipe[op] = False
        while forgotten:
            for u in problem.inputs[forgotten.pop()]:
                self._wants[u] -= 1
                if not self._wants[u]:
                    self._drop(u)
                    producer = problem.producer[u]
                    if self._recipe[producer] and not any(self._wants[o] for o in problem.outputs[producer]):
                        self._recipe[producer] = False
                        forgotten.append(producer)

    def _release(self, v: int) -> None:
        """A handle is gone."""
        self._wants[v] -= 1
        if not self._wants[v]:
            self._drop(v)
            producer = self.problem.producer[v]
            if self._recipe[producer] and not any(self._wants[o] for o in self.problem.outputs[producer]):
                self._forget(producer)

    def _drop(self, v: int) -> None:
        """Nothing of ours holds v any more."""
        if not self._resident[v]:
            self._unpacked(v)
            if self._reading.is_begun(v):
                self._reading.forget(v)
                self._live -= self.problem.nbytes[v]
                if self.watcher is not None:
                    self.watcher.change(v, -1, 0)
            return
        self._resident[v] = False
        stays = self._stays_until.get(v, -1) >= self._ask
        if stays:
            self._stay_on(v)
        else:
            self._live -= self.problem.nbytes[v]
        if self.watcher is not None:
            self.watcher.change(v, -1, int(stays))

    def _drop_unless_answered(self, v: int) -> None:
        """What was made as an intermediate is not retained, unless a handle has been given it."""
        if not self._answered[v]:
            self._drop(v)

    def _stay_on(self, v: int) -> None:
        """Its bytes stay, though not for us."""
        self._natural[v] = True
        self._leaves_after.setdefault(self.problem.natural_last_unpack[v], []).append(v)

    def _note(self, beside_bytes: int = 0) -> None:
        if self._live + beside_bytes > self._noted_bytes:
            self._noted_bytes = self._live + beside_bytes
            here = range(self.problem.n_values)
            self.seen = [v for v in here if self._resident[v] or self._natural[v] or self._reading.is_begun(v)]
