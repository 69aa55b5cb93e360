"""Which value to evict when memory is short: the one that is cheapest to do without, per byte and per wait.

The heuristic is h-DTR (Kirisame et al., 2021): cost / (bytes × staleness), where the cost of dropping a value
is that of its own op and of all its evicted neighbours, above and below, because they would have to be made
again with it. Neighbourhoods are kept as clusters in a union-find, an approximation that never has to be
walked: a cluster only forgets the cost of a member that is made again. Candidates are a bounded random sample
of the pool, so that an eviction costs the same however many values there are.

Two changes to h-DTR (`benchmarks/online.py --variants` compares). In place of staleness stands the wait until backward
asks for the value, as far as it can be known: backward asks in the reverse order of saving, so that the wait is the
distance from where backward is (in forward: from now) down to where the value was saved. And a value that autograd
did not save, or has asked for as often as it will, is wanted only by other values, and goes first.
"""

from __future__ import annotations

import heapq
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .values import Value

if TYPE_CHECKING:
    from ..codecs import Encoded
    from ..profiling.tiers import Speed
    from ..stores import Store, StoreStats, Ticket


@dataclass(frozen=True)
class Heuristic:
    """How values are compared. The default is what is used; the others are for the benchmark."""

    wait: Literal["until asked", "since used", "none"] = "until asked"
    """What the cost is divided by, beside the bytes; "since used" is the staleness of h-DTR."""
    neighbours: bool = True
    """Whether the cost is also that of dropped neighbours; without, it is that of the value's own op."""
    cost: bool = True
    """Whether cost and size count at all; without, the least recently used is evicted first."""
    unsaved_share: float = 0.0
    """What part of its cost counts for a value that only other values are made from."""
    sample: int = 64
    """How many values are looked at before one is chosen."""


HEURISTIC = Heuristic()

_FARTHEST = 32  # how many values that were never held are followed upwards when one is dropped
_MOST_NEAR = 8


class Cluster:
    """Evicted values that are neighbours of each other, and what making them all again would cost."""

    __slots__ = ("cost_us", "parent")

    def __init__(self, cost_us: float) -> None:
        self.cost_us = cost_us
        self.parent: Cluster | None = None

    def root(self) -> Cluster:
        """The cluster that this one has become part of."""
        cluster = self
        while cluster.parent is not None:
            if cluster.parent.parent is not None:
                cluster.parent = cluster.parent.parent
            cluster = cluster.parent
        return cluster


def _joined(one: Cluster, other: Cluster) -> Cluster:
    one, other = one.root(), other.root()
    if one is not other:
        other.parent = one
        one.cost_us += other.cost_us
    return one


class Seat:
    """What is known of a value that may be evicted, and where its content is while it is."""

    __slots__ = ("cluster", "codec_us", "encoded", "made", "near", "pooled", "saves", "store", "ticket", "touched")

    def __init__(self) -> None:
        self.cluster: Cluster | None = None  # while it is dropped
        self.near: list[Cluster] = []  # clusters of dropped values that were made from this one
        self.touched = 0  # when it was last used, by the pool's clock
        self.made = 0  # about when forward made it
        self.saves: list[int] = []  # when autograd saved it, without those times that backward has asked since
        self.pooled = False
        self.encoded: Encoded | None = None
        self.codec_us: float | None = None  # for each byte that compressing it saves, once that is known
        self.ticket: Ticket | None = None  # also while it is in memory: what is written once need not be again
        self.store: Store | None = None

    @property
    def is_away(self) -> bool:
        """Whether the content can be brought back without replaying anything."""
        return self.encoded is not None or self.ticket is not None


def seat_of(value: Value) -> Seat:
    """The value's seat; it gets one if it has none."""
    seat = value.seat
    if seat is None:
        seat = value.seat = Seat()
    return seat


def cost_of_dropping(value: Value) -> float:
    """The microseconds to make a value again, if it were dropped now."""
    assert value.recipe is not None
    if not HEURISTIC.neighbours:
        return value.recompute_us
    return value.recompute_us + sum(cluster.cost_us for cluster in _neighbours(value))


def score(value: Value, cost_us: float, pool: Pool) -> float:
    """What evicting a value costs for each byte and moment that its memory is free; the least goes first."""
    rules = HEURISTIC
    seat = seat_of(value)
    if rules.wait == "until asked":
        wait = pool.front - (seat.saves[-1] if seat.saves else seat.made)
    elif rules.wait == "since used":
        wait = pool.clock - seat.touched
    else:
        wait = 0
    if not rules.cost:
        return -wait
    if not seat.saves:
        cost_us *= rules.unsaved_share
    return cost_us / (value.nbytes * (max(wait, 0) + 1))


def least_first(values: list[Value], score_of: Callable[[Value], float | None]) -> Iterator[Value]:
    """These values, that with the least score first; scores rise while neighbours are evicted. None: not at all."""
    heap = [(found, place) for place, value in enumerate(values) if (found := score_of(value)) is not None]
    heapq.heapify(heap)
    while heap:
        known, place = heapq.heappop(heap)
        now = score_of(values[place])
        if now is None:
            continue
        if now > known and heap and now > heap[0][0]:
            heapq.heappush(heap, (now, place))
        else:
            yield values[place]


def drop(value: Value) -> None:
    """Let go of a value's memory; its recipe will make it again."""
    seat = seat_of(value)
    neighbours = _neighbours(value)
    cluster = Cluster(value.recompute_us)
    for other in neighbours:
        cluster = _joined(cluster, other)
    seat.cluster = cluster
    seat.near.clear()
    assert value.recipe is not None
    for ref in value.recipe.refs:
        above = ref.value
        if above.tensor is not None and above.recipe is not None:
            near = seat_of(above).near
            near.append(cluster)
            if len(near) > _MOST_NEAR:
                near[:] = {c.root() for c in near}
    value.let_go()


def made_again(value: Value) -> None:
    """A dropped value is there again: its neighbours became cheaper."""
    seat = value.seat
    if seat is not None and seat.cluster is not None:
        root = seat.cluster.root()
        root.cost_us = max(0.0, root.cost_us - value.recompute_us)
        seat.cluster = None


def _neighbours(value: Value) -> list[Cluster]:
    """The clusters that would have to be made again with this value, each once."""
    assert value.recipe is not None
    found: list[Cluster] = []
    for ref in value.recipe.refs:
        if _is_missing(ref.value):
            root = _cluster_of(ref.value)
            if root not in found:
                found.append(root)
    if value.seat is not None:
        for cluster in value.seat.near:
            root = cluster.root()
            if root not in found:
                found.append(root)
    return found


def _is_missing(value: Value) -> bool:
    return value.tensor is None and value.recipe is not None and (value.seat is None or not value.seat.is_away)


def _cluster_of(value: Value) -> Cluster:
    """The cluster of a value that is not in memory. What was never saved is as good as dropped when it was made."""
    if value.seat is not None and value.seat.cluster is not None:
        return value.seat.cluster.root()
    cluster = Cluster(0.0)
    pending = [value]
    followed = 0
    while pending and followed < _FARTHEST:
        one = pending.pop()
        seat = seat_of(one)
        if seat.cluster is not None:
            cluster = _joined(cluster, seat.cluster)
            continue
        followed += 1
        cluster = cluster.root()
        cluster.cost_us += one.recompute_us
        seat.cluster = cluster
        assert one.recipe is not None
        pending.extend(ref.value for ref in one.recipe.refs if _is_missing(ref.value))
    return cluster.root()


class Pace:
    """What a byte takes to a store and back, in time that is not hidden behind ops: learnt as it goes."""

    _FLOOR = 0.1  # a thread that writes takes memory bandwidth, if nothing else
    _MEMORY_SECONDS = 1.0

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.waited_seconds = 0.05  # about half is hidden, until it is known better
        self._moved_seconds = 0.1
        self._put_bytes = self._fetched_bytes = -1

    @property
    def out_us(self) -> float:
        """Microseconds a byte, to the store."""
        return self._exposed * 1e6 / self.speed.out_bytes_per_s

    @property
    def in_us(self) -> float:
        """Microseconds a byte, back."""
        return self._exposed * 1e6 / self.speed.in_bytes_per_s

    @property
    def _exposed(self) -> float:
        return min(1.0, max(self._FLOOR, self.waited_seconds / self._moved_seconds))

    def moved(self, stats: StoreStats) -> None:
        """See what was moved since the last time; what is long ago counts less and less."""
        if self._put_bytes >= 0:
            self._moved_seconds += (stats.put_bytes - self._put_bytes) / self.speed.out_bytes_per_s
            self._moved_seconds += (stats.fetched_bytes - self._fetched_bytes) / self.speed.in_bytes_per_s
        self._put_bytes, self._fetched_bytes = stats.put_bytes, stats.fetched_bytes
        if self._moved_seconds > self._MEMORY_SECONDS:
            self._moved_seconds /= 2
            self.waited_seconds /= 2


class Pool:
    """The values in memory that may be evicted. Holds none of them."""

    def __init__(self) -> None:
        self.clock = 0  # counts ops
        self.front = 0  # where backward is, by the clock of forward; in forward, about now
        self.ahead: list[weakref.ref[Value]] = []  # read ahead from a store; what is asked for last is last
        self._members: list[weakref.ref[Value]] = []
        self._random = random.Random(0)  # the same choices every time

    def add(self, value: Value) -> None:
        """A value is in memory, and may be evicted from now on."""
        seat = seat_of(value)
        if not seat.pooled:
            seat.pooled = True
            self._members.append(weakref.ref(value))

    def sample(self) -> tuple[list[Value], bool]:
        """Some members, and whether these are all there are."""
        count = HEURISTIC.sample
        members = self._members
        if len(members) <= count:
            return self.all(), True
        found: dict[int, Value] = {}
        for _ in range(2 * count):
            if len(found) == count or not members:
                break
            place = self._random.randrange(len(members))
            value = members[place]()
            if value is not None and value.tensor is not None:
                found[id(value)] = value
            else:
                self._leave(value)
                members[place] = members[-1]
                members.pop()
        return list(found.values()), False

    def all(self) -> list[Value]:
        """Every member."""
        found = []
        staying = []
        for member in self._members:
            value = member()
            if value is not None and value.tensor is not None:
                found.append(value)
                staying.append(member)
            else:
                self._leave(value)
        self._members[:] = staying
        return found

    def is_empty(self) -> bool:
        """Whether no member is in memory any more."""
        while self._members:
            value = self._members[-1]()
            if value is not None and value.tensor is not None:
                return False
            self._leave(value)
            self._members.pop()
        return True

    def _leave(self, value: Value | None) -> None:
        if value is not None and value.seat is not None:
            value.seat.pooled = False
