"""Eviction: which value to drop, compress or offload when memory is short.

The heuristic is h-DTR (Kirisame et al., 2021): cost / (bytes x staleness). The cost of dropping a value is the time of
its own op and of all its evicted neighbours, above and below, because they would be recomputed with it. Neighbours are
kept as clusters in a union-find, an approximation that never walks the graph: recomputing a member only subtracts its
cost. Candidates are a bounded random sample, so an eviction costs the same for any number of values.

Two changes to h-DTR (`benchmarks/online.py --variants` compares them). Staleness is replaced by the estimated wait
until backward unpacks the value: backward unpacks in the reverse order of saving, so the wait is the distance from
the present position (in forward: now) to where the value was saved. And a value that autograd did not save, or that
was unpacked as often as it was saved, is used only to recompute other values and is evicted first.
"""

from __future__ import annotations

import heapq
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..values.value import Value

if TYPE_CHECKING:
    from ...stores import StoreStats
    from ...stores.speed import Speed
    from .placement import Placement


@dataclass(frozen=True)
class Heuristic:
    """How values are compared. The engine uses the default; benchmarks compare others."""

    wait: Literal["until unpack", "since use", "none"] = "until unpack"
    """Time that the cost is divided by; "since use" is the staleness of h-DTR."""
    neighbours: bool = True
    """Whether the cost includes evicted neighbours."""
    cost: bool = True
    """Whether cost and size count. Without them the least recently used value is evicted first."""
    unsaved_share: float = 0.0
    """Share of the cost that counts for a value that autograd did not save."""
    sample: int = 64
    """Values compared per eviction. Doubled: slightly better choices, twice the time per eviction."""


_MAX_FOLLOWED = 32
"""Values that were never in memory, followed upwards when a value is dropped. Doubled: better costs, slower drops."""
_MAX_NEAR = 8
"""Clusters remembered per value before duplicates are removed. Doubled: less work, more memory."""


class Cluster:
    """Evicted values that are neighbours of each other, and the cost of recomputing them all."""

    __slots__ = ("cost_us", "parent")

    def __init__(self, cost_us: float) -> None:
        self.cost_us = cost_us
        self.parent: Cluster | None = None

    def root(self) -> Cluster:
        """Return the cluster that this one was merged into."""
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


class Residency:
    """The eviction state of one value, and the placement of its content outside memory."""

    __slots__ = ("cluster", "codec_us", "is_pooled", "made", "near", "placement", "saves", "touched")

    def __init__(self) -> None:
        self.cluster: Cluster | None = None  # while it is dropped
        self.near: list[Cluster] = []  # clusters of dropped values that read this one
        self.touched = 0  # last use, by the pool's clock
        self.made = 0  # creation in forward, by the pool's clock
        self.saves: list[int] = []  # times at which autograd saved it and has not unpacked it since
        self.is_pooled = False
        self.codec_us: float | None = None  # time per byte that compression saves, once measured
        self.placement: Placement | None = None  # may be set while the value is in memory: it is written only once


def residency_of(value: Value) -> Residency:
    """Return the residency of a value, created on first use."""
    residency = value.residency
    if residency is None:
        residency = value.residency = Residency()
    return residency


def cost_of_dropping(value: Value, pool: Pool) -> float:
    """Return the microseconds to recompute a value if it were dropped now."""
    assert value.recipe is not None
    if not pool.heuristic.neighbours:
        return value.recompute_us
    return value.recompute_us + sum(cluster.cost_us for cluster in _neighbours(value))


def score(value: Value, cost_us: float, pool: Pool) -> float:
    """Return the cost of evicting a value per byte and per unit of time. The lowest score is evicted first."""
    rules = pool.heuristic
    residency = residency_of(value)
    if rules.wait == "until unpack":
        wait = pool.front - (residency.saves[-1] if residency.saves else residency.made)
    elif rules.wait == "since use":
        wait = pool.clock - residency.touched
    else:
        wait = 0
    if not rules.cost:
        return -wait
    if not residency.saves:
        cost_us *= rules.unsaved_share
    return cost_us / (value.nbytes * (max(wait, 0) + 1))


def least_first(values: list[Value], score_of: Callable[[Value], float | None]) -> Iterator[Value]:
    """Yield values in order of their score, which rises while neighbours are evicted. A score of None excludes one."""
    heap = [(found, location) for location, value in enumerate(values) if (found := score_of(value)) is not None]
    heapq.heapify(heap)
    while heap:
        known, location = heapq.heappop(heap)
        now = score_of(values[location])
        if now is None:
            continue
        if now > known and heap and now > heap[0][0]:
            heapq.heappush(heap, (now, location))
        else:
            yield values[location]


def drop(value: Value) -> None:
    """Free the memory of a value that its recipe can recompute."""
    residency = residency_of(value)
    neighbours = _neighbours(value)
    cluster = Cluster(value.recompute_us)
    for other in neighbours:
        cluster = _joined(cluster, other)
    residency.cluster = cluster
    residency.near.clear()
    assert value.recipe is not None
    for ref in value.recipe.refs:
        above = ref.value
        if above.tensor is not None and above.recipe is not None:
            near = residency_of(above).near
            near.append(cluster)
            if len(near) > _MAX_NEAR:
                near[:] = {c.root() for c in near}
    value.release()


def recomputed(value: Value) -> None:
    """Subtract a recomputed value from the cost of its cluster."""
    residency = value.residency
    if residency is not None and residency.cluster is not None:
        root = residency.cluster.root()
        root.cost_us = max(0.0, root.cost_us - value.recompute_us)
        residency.cluster = None


def _neighbours(value: Value) -> list[Cluster]:
    """Return the clusters that would be recomputed with this value, each once."""
    assert value.recipe is not None
    found: list[Cluster] = []
    for ref in value.recipe.refs:
        if _is_missing(ref.value):
            root = _cluster_of(ref.value)
            if root not in found:
                found.append(root)
    if value.residency is not None:
        for cluster in value.residency.near:
            root = cluster.root()
            if root not in found:
                found.append(root)
    return found


def _is_missing(value: Value) -> bool:
    is_placed = value.residency is not None and value.residency.placement is not None
    return value.tensor is None and value.recipe is not None and not is_placed


def _cluster_of(value: Value) -> Cluster:
    """Return the cluster of a value that is not in memory. A value that was never saved counts as dropped."""
    if value.residency is not None and value.residency.cluster is not None:
        return value.residency.cluster.root()
    cluster = Cluster(0.0)
    pending = [value]
    followed = 0
    while pending and followed < _MAX_FOLLOWED:
        one = pending.pop()
        residency = residency_of(one)
        if residency.cluster is not None:
            cluster = _joined(cluster, residency.cluster)
            continue
        followed += 1
        cluster = cluster.root()
        cluster.cost_us += one.recompute_us
        residency.cluster = cluster
        assert one.recipe is not None
        pending.extend(ref.value for ref in one.recipe.refs if _is_missing(ref.value))
    return cluster.root()


class Pace:
    """Time per byte to a store and back that ops do not hide, learned while training."""

    _MIN_EXPOSED = 0.1  # share of a transfer that is never hidden: writers use memory bandwidth
    _MEMORY_SECONDS = 1.0  # transfers older than this count half

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.waited_seconds = 0.05  # half is hidden until measured
        self._moved_seconds = 0.1
        self._put_bytes = self._fetched_bytes = -1

    @property
    def out_us(self) -> float:
        """Microseconds per byte, to the store."""
        return self._exposed * 1e6 / self.speed.out_bytes_per_s

    @property
    def in_us(self) -> float:
        """Microseconds per byte, from the store."""
        return self._exposed * 1e6 / self.speed.in_bytes_per_s

    @property
    def _exposed(self) -> float:
        return min(1.0, max(self._MIN_EXPOSED, self.waited_seconds / self._moved_seconds))

    def moved(self, stats: StoreStats) -> None:
        """Learn from the transfers since the last call. Old transfers count less."""
        if self._put_bytes >= 0:
            self._moved_seconds += (stats.put_bytes - self._put_bytes) / self.speed.out_bytes_per_s
            self._moved_seconds += (stats.fetched_bytes - self._fetched_bytes) / self.speed.in_bytes_per_s
        self._put_bytes, self._fetched_bytes = stats.put_bytes, stats.fetched_bytes
        if self._moved_seconds > self._MEMORY_SECONDS:
            self._moved_seconds /= 2
            self.waited_seconds /= 2


class Pool:
    """The values in memory that may be evicted, by weak references."""

    def __init__(self, heuristic: Heuristic | None = None) -> None:
        self.heuristic = Heuristic() if heuristic is None else heuristic
        self.clock = 0  # number of ops so far
        self.front = 0  # position of backward on the clock of forward; in forward, about now
        self.prefetched: list[weakref.ref[Value]] = []  # in the order of their unpacks
        self._members: list[weakref.ref[Value]] = []
        self._random = random.Random(0)  # the same choices in every run

    def add(self, value: Value) -> None:
        """Add a value that is in memory and may be evicted."""
        residency = residency_of(value)
        if not residency.is_pooled:
            residency.is_pooled = True
            self._members.append(weakref.ref(value))

    def sample(self) -> tuple[list[Value], bool]:
        """Return a random sample of members, and whether it is complete."""
        count = self.heuristic.sample
        members = self._members
        if len(members) <= count:
            return self.all(), True
        found: dict[int, Value] = {}
        for _ in range(2 * count):
            if len(found) == count or not members:
                break
            location = self._random.randrange(len(members))
            value = members[location]()
            if value is not None and value.tensor is not None:
                found[id(value)] = value
            else:
                self._removed(value)
                members[location] = members[-1]
                members.pop()
        return list(found.values()), False

    def all(self) -> list[Value]:
        """Return every member."""
        found = []
        staying = []
        for member in self._members:
            value = member()
            if value is not None and value.tensor is not None:
                found.append(value)
                staying.append(member)
            else:
                self._removed(value)
        self._members[:] = staying
        return found

    def clear(self) -> None:
        """Remove all members."""
        for value in self.all():
            self._removed(value)
        self._members.clear()

    def is_empty(self) -> bool:
        """Return whether no member is in memory."""
        while self._members:
            value = self._members[-1]()
            if value is not None and value.tensor is not None:
                return False
            self._removed(value)
            self._members.pop()
        return True

    def _removed(self, value: Value | None) -> None:
        if value is not None and value.residency is not None:
            value.residency.is_pooled = False
