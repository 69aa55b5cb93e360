"""How fast a store is on this machine, to be set against the time of a recompute.

A measurement moves a bounded number of bytes, takes the memory of one value of it (8 MiB at most, and what the store
has in flight), draws nothing from anybody's generator, and leaves nothing in the store but its counts. It is one
wall-clock time on a machine in use, not a benchmark; and what goes to a disk goes to the system's page cache
first, so that only an amount beyond that cache shows the disk alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from .._errors import StoreError
from .._units import parse_bytes
from . import Store, Ticket

VALUES = 8
MAX_VALUE_BYTES = 8 * 2**20
_CLOCK_S = 1e-7  # no time is taken for shorter than this, so that no speed is infinite


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes of the value a second, whatever is kept of it."""

    out_bytes_per_s: float
    """Out of memory: put and written."""
    in_bytes_per_s: float
    """Back: fetched without a hint."""

    def round_trip_seconds(self, nbytes: int) -> float:
        """How long a value of `nbytes` takes there and back, if nothing hides it."""
        return nbytes / self.out_bytes_per_s + nbytes / self.in_bytes_per_s


def measure_store(store: Store, nbytes: str | int = "64 MiB", *, device: torch.device | None = None) -> Speed:
    """Put `nbytes` in values of equal size, wait until they are out of memory, and fetch them one by one.

    Values are on `device`: the accelerator if there is one and it is not given, else the CPU. What others have put
    and is still on its way is waited for too.

    >>> from lowtide.stores.speed import measure_store
    >>> from lowtide.stores import DiskStore
    >>> with DiskStore() as store:
    ...     speed = measure_store(store, "1 MiB")
    >>> speed.round_trip_seconds(1 << 30) > 0
    True
    """
    total = parse_bytes(nbytes)
    if device is None:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    size = min(max(1, total // VALUES), MAX_VALUE_BYTES)
    generator = torch.Generator("cpu").manual_seed(0)
    value = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator, device="cpu").to(device)
    tickets: list[Ticket] = []
    try:
        tickets.append(store.put(value, "a measurement"))
        store.drain(size)
        store.fetch(tickets[0])  # the first time is dearer
        start = _now(device)
        tickets.extend(store.put(value, "a measurement") for _ in range(-(-total // size)))
        store.drain(len(tickets) * size)
        middle = _now(device)
        moved = _written_tickets(store, tickets[1:])
        back = _now(device)
        for ticket in reversed(moved):
            store.fetch(ticket)
        end = _now(device)
    finally:
        for ticket in tickets:
            store.drop(ticket)
    return Speed(
        out_bytes_per_s=len(moved) * size / max(middle - start, _CLOCK_S),
        in_bytes_per_s=len(moved) * size / max(end - back, _CLOCK_S),
    )


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """What values cost a step on their way to a store and back, beside ops that go on meanwhile."""

    put_s: float
    """To hand one over, and what its writing takes from the ops beside it."""
    put_s_per_byte: float
    fetch_s: float
    """To fetch one, beside its bytes."""
    fetch_bytes_per_s: float
    prefetch_bytes_per_s: float
    """How fast they are read ahead, beside ops."""
    prefetch_s_each: float
    """What reading one ahead takes from the ops beside it, and fetching it then."""
    prefetch_s_per_byte: float


def measure_transfer_costs(store: Store, *, device: torch.device | None = None) -> TransferCosts:
    """Run ops with and without values being put or read ahead beside them, and fetch those; small and large ones.

    The quickest of a few rounds, so that what else the machine does counts as little as it can.

    >>> from lowtide.stores.speed import measure_transfer_costs
    >>> from lowtide.stores import DiskStore
    >>> with DiskStore() as store:
    ...     measure_transfer_costs(store).fetch_bytes_per_s > 0
    True
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    work = _Work(device)
    rounds = [_round(store, size, work, device) for _ in range(_ROUNDS) for size in _SAMPLE_BYTES]
    alone_s = min(one.alone_s for one in rounds)
    small, large = (rounds[k :: len(_SAMPLE_BYTES)] for k in range(len(_SAMPLE_BYTES)))
    put_s, put_s_per_byte = _line(*((min(one.put_s for one in some) - alone_s) / VALUES for some in (small, large)))
    fetch_s, fetch_s_per_byte = _line(*(min(one.fetch_s for one in some) for some in (small, large)))
    prefetch_s, prefetch_s_per_byte = _line(*(min(one.prefetch_s for one in some) for some in (small, large)))
    return TransferCosts(
        put_s=put_s,
        put_s_per_byte=put_s_per_byte,
        fetch_s=fetch_s,
        fetch_bytes_per_s=1 / max(1e-12, fetch_s_per_byte),
        prefetch_bytes_per_s=_SAMPLE_BYTES[1] / max(_CLOCK_S, min(one.reading_s for one in large)),
        prefetch_s_each=prefetch_s,
        prefetch_s_per_byte=prefetch_s_per_byte,
    )


_OPS_A_VALUE, _ROUNDS = 4, 5
_MOST_OPS = 400  # beside reads that never end: a tenth of a second
_SAMPLE_BYTES = (2**17, 2**20)


class _Work:
    """Ops as a model has them: some calculate, some go through more memory than the caches hold.

    The latter are what traffic beside them slows down. Their memory is no tensor's, and so nobody's budget's.
    """

    _SIZE, _SLICES, _SLICE_BYTES = 96, 16, 2**21

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.ones(self._SIZE, self._SIZE, device=device)
        # On an accelerator memory is moved by other means than the processor's.
        self._memory = np.zeros((self._SLICES, self._SLICE_BYTES if device.type == "cpu" else 0), dtype=np.uint8)
        self._at = 0

    def op(self) -> None:
        """The next one."""
        torch.mm(self._matrix, self._matrix)
        np.copyto(self._memory[self._at], self._memory[self._at - self._SLICES // 2])
        self._at = (self._at + 1) % self._SLICES


@dataclass(frozen=True, slots=True)
class _Round:
    """Seconds of some ops alone, of the same with values put beside them; and, of one value, of the other ways."""

    alone_s: float
    put_s: float
    fetch_s: float
    reading_s: float
    """Until it is read, beside ops."""
    prefetch_s: float
    """What that takes from the ops, and fetching."""


def _line(small_s: float, large_s: float) -> tuple[float, float]:
    """What a small and a large value took: what each takes, and each byte."""
    small_s, large_s = max(0.0, small_s), max(0.0, large_s)
    small, large = _SAMPLE_BYTES
    per_byte = max(0.0, (large_s - small_s) / (large - small))
    return max(0.0, small_s - small * per_byte), per_byte


def _round(store: Store, size: int, work: _Work, device: torch.device) -> _Round:
    """Put values beside ops until they are written, fetch them, and read them ahead beside ops."""

    def ops() -> None:
        for _ in range(_OPS_A_VALUE):
            work.op()

    values = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(VALUES)]
    start = _now(device)
    for _ in values:
        ops()
    middle = _now(device)
    tickets = []
    try:
        for value in values:
            tickets.append(store.put(value, "a measurement"))
            ops()
        del value
        put = _now(device)
        values.clear()
        store.drain(VALUES * size)
        moved = _written_tickets(store, tickets)
        back = _now(device)
        for ticket in reversed(moved):
            store.fetch(ticket)
        end = _now(device)
        fetch_s = (end - back) / len(moved)
        reading_s, prefetch_s = _read_ahead(store, moved, work, device) or (fetch_s, fetch_s)
    finally:
        for ticket in tickets:
            store.drop(ticket)
    return _Round(middle - start, put - middle, fetch_s, reading_s, prefetch_s)


def _read_ahead(store: Store, tickets: list[Ticket], work: _Work, device: torch.device) -> tuple[float, float] | None:
    """Seconds a value until it is read, beside ops, and taken from those; None for a store that does not read ahead."""
    tickets = tickets[: store.max_prefetch_bytes // tickets[0].nbytes]
    if not tickets:
        return None

    def ops(most: int) -> int:
        """Run ops until all is read: how many."""
        for count in range(most):
            if all(store.is_resident(ticket) for ticket in reversed(tickets)):
                return count
            work.op()
        return most

    start = _now(device)
    alone = ops(_OPS_A_VALUE * VALUES)
    middle = _now(device)
    for ticket in tickets:
        store.prefetch(ticket)
    beside = ops(_MOST_OPS)
    read = _now(device)
    for ticket in tickets:
        store.fetch(ticket)
    end = _now(device)
    taken_s = end - middle - beside * (middle - start) / max(1, alone)
    return (read - middle) / len(tickets), taken_s / len(tickets)


def _written_tickets(store: Store, tickets: list[Ticket]) -> list[Ticket]:
    written = [ticket for ticket in tickets if not ticket.fell_back]
    if not written:
        raise StoreError(f"the {store.tier} store cannot be measured, because its writes fail: see its warning")
    return written


def _now(device: torch.device) -> float:
    if device.type != "cpu":  # not yet run on an accelerator
        torch.accelerator.synchronize(device)
    return time.perf_counter()
