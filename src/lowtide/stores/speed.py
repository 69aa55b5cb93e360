"""Measures the speed of a store on this machine, to compare offloading with recomputation.

A measurement moves a fixed number of bytes and holds one value of at most 8 MiB, besides the bytes that the store
has in flight. It does not change the random state, and it changes nothing in the store but its statistics.
Results are wall-clock times on a machine in use, not benchmarks. Writes go to the page cache of the operating
system first, so small measurements do not show the speed of the disk itself.
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
_MIN_SECONDS = 1e-7  # shorter times are rounded up, so that speeds are finite
_NAME = "a measurement"


@dataclass(frozen=True, slots=True)
class Speed:
    """Transfer speeds, in bytes of the value."""

    out_bytes_per_s: float
    """Speed of put and write."""
    in_bytes_per_s: float
    """Speed of fetches without prefetch."""

    def round_trip_seconds(self, nbytes: int) -> float:
        """Return the time to write and fetch `nbytes`, without overlap with compute."""
        return nbytes / self.out_bytes_per_s + nbytes / self.in_bytes_per_s


def measure_store(store: Store, nbytes: str | int = "64 MiB", *, device: torch.device | None = None) -> Speed:
    """Put `nbytes` in values of equal size, wait until they have left memory, and fetch them one by one.

    Values are on `device`; the default is the accelerator if there is one, else the CPU. Earlier values that are
    in flight are waited for, too.

    >>> from lowtide.stores.speed import measure_store
    >>> from lowtide.stores import DiskStore
    >>> with DiskStore() as store:
    ...     speed = measure_store(store, "1 MiB")
    >>> speed.round_trip_seconds(1 << 30) > 0
    True
    """
    total = parse_bytes(nbytes)
    device = device or _default_device()
    size = min(max(1, total // VALUES), MAX_VALUE_BYTES)
    generator = torch.Generator("cpu").manual_seed(0)
    value = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator, device="cpu").to(device)
    tickets: list[Ticket] = []
    try:
        tickets.append(store.put(value, _NAME))
        store.drain(size)
        store.fetch(tickets[0])  # warm-up
        start = _now(device)
        tickets.extend(store.put(value, _NAME) for _ in range(-(-total // size)))
        store.drain(len(tickets) * size)
        written_at = _now(device)
        written = _written_tickets(store, tickets[1:])
        fetch_start = _now(device)
        for ticket in reversed(written):
            store.fetch(ticket)
        end = _now(device)
    finally:
        for ticket in tickets:
            store.drop(ticket)
    return Speed(
        out_bytes_per_s=len(written) * size / max(written_at - start, _MIN_SECONDS),
        in_bytes_per_s=len(written) * size / max(end - fetch_start, _MIN_SECONDS),
    )


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """Time that a step loses to transfers that run in parallel with its ops."""

    put_s: float
    """Seconds added to the ops for each value that is put."""
    put_s_per_byte: float
    fetch_s: float
    """Fixed seconds of one blocking fetch."""
    fetch_bytes_per_s: float
    prefetch_bytes_per_s: float
    """Read speed while ops run."""
    prefetch_s_each: float
    """Seconds added to the ops for each value that is prefetched."""
    prefetch_s_per_byte: float


def measure_transfer_costs(store: Store, *, device: torch.device | None = None) -> TransferCosts:
    """Time ops alone, with puts, and with prefetches in the background, and time fetches.

    Small and large values give fixed costs and costs per byte. The fastest of a few rounds counts, to reduce the
    influence of other load on the machine.

    >>> from lowtide.stores.speed import measure_transfer_costs
    >>> from lowtide.stores import DiskStore
    >>> with DiskStore() as store:
    ...     measure_transfer_costs(store).fetch_bytes_per_s > 0
    True
    """
    device = device or _default_device()
    workload = _Workload(device)
    rounds = [_round(store, size, workload, device) for _ in range(_ROUNDS) for size in _SAMPLE_BYTES]
    ops_s = min(one.ops_s for one in rounds)
    small, large = (rounds[k :: len(_SAMPLE_BYTES)] for k in range(len(_SAMPLE_BYTES)))
    put_s, put_s_per_byte = _fit_line(
        *((min(one.ops_with_puts_s for one in some) - ops_s) / VALUES for some in (small, large))
    )
    fetch_s, fetch_s_per_byte = _fit_line(*(min(one.fetch_s for one in some) for some in (small, large)))
    prefetch_s, prefetch_s_per_byte = _fit_line(*(min(one.prefetch_s for one in some) for some in (small, large)))
    return TransferCosts(
        put_s=put_s,
        put_s_per_byte=put_s_per_byte,
        fetch_s=fetch_s,
        fetch_bytes_per_s=1 / max(1e-12, fetch_s_per_byte),
        prefetch_bytes_per_s=_SAMPLE_BYTES[1] / max(_MIN_SECONDS, min(one.prefetch_read_s for one in large)),
        prefetch_s_each=prefetch_s,
        prefetch_s_per_byte=prefetch_s_per_byte,
    )


_OPS_PER_VALUE, _ROUNDS = 4, 5
_MAX_PREFETCH_OPS = 400  # limit for reads that do not end: about 0.1 s
_SAMPLE_BYTES = (2**17, 2**20)


class _Workload:
    """Ops like those of a model: a matmul, and a copy of more memory than the CPU caches hold.

    Transfers slow down the copies. The copies use NumPy memory, which no memory budget counts.
    """

    _SIZE, _SLICES, _SLICE_BYTES = 96, 16, 2**21

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.ones(self._SIZE, self._SIZE, device=device)
        # No copies for an accelerator, whose transfers do not use the CPU.
        self._memory = np.zeros((self._SLICES, self._SLICE_BYTES if device.type == "cpu" else 0), dtype=np.uint8)
        self._slice = 0

    def run_op(self) -> None:
        """Run the next op."""
        torch.mm(self._matrix, self._matrix)
        np.copyto(self._memory[self._slice], self._memory[self._slice - self._SLICES // 2])
        self._slice = (self._slice + 1) % self._SLICES


@dataclass(frozen=True, slots=True)
class _Round:
    """Times of one round. The last three are per value."""

    ops_s: float
    ops_with_puts_s: float
    fetch_s: float
    prefetch_read_s: float
    """Until the value is read, while ops run."""
    prefetch_s: float
    """Slowdown of the ops, and the fetch."""


def _fit_line(small_s: float, large_s: float) -> tuple[float, float]:
    """Return fixed seconds and seconds per byte of the line through the times of a small and a large value."""
    small_s, large_s = max(0.0, small_s), max(0.0, large_s)
    small, large = _SAMPLE_BYTES
    per_byte = max(0.0, (large_s - small_s) / (large - small))
    return max(0.0, small_s - small * per_byte), per_byte


def _round(store: Store, size: int, workload: _Workload, device: torch.device) -> _Round:
    """Time ops alone and with puts, then fetches, then prefetches while ops run."""

    def run_ops() -> None:
        for _ in range(_OPS_PER_VALUE):
            workload.run_op()

    values = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(VALUES)]
    start = _now(device)
    for _ in values:
        run_ops()
    put_start = _now(device)
    tickets = []
    try:
        for value in values:
            tickets.append(store.put(value, _NAME))
            run_ops()
        del value
        put_end = _now(device)
        values.clear()
        store.drain(VALUES * size)
        written = _written_tickets(store, tickets)
        fetch_start = _now(device)
        for ticket in reversed(written):
            store.fetch(ticket)
        fetch_s = (_now(device) - fetch_start) / len(written)
        prefetch_read_s, prefetch_s = _time_prefetch(store, written, workload, device) or (fetch_s, fetch_s)
    finally:
        for ticket in tickets:
            store.drop(ticket)
    return _Round(put_start - start, put_end - put_start, fetch_s, prefetch_read_s, prefetch_s)


def _time_prefetch(
    store: Store, tickets: list[Ticket], workload: _Workload, device: torch.device
) -> tuple[float, float] | None:
    """Return the seconds per value until it is read, and those lost by the ops. None if the tier has no prefetch."""
    tickets = tickets[: store.max_prefetch_bytes // tickets[0].nbytes]
    if not tickets:
        return None

    def run_ops(max_ops: int) -> int:
        """Run ops until all values are read. Return the number of ops."""
        for count in range(max_ops):
            if all(store.is_resident(ticket) for ticket in reversed(tickets)):
                return count
            workload.run_op()
        return max_ops

    start = _now(device)
    ops_alone = run_ops(_OPS_PER_VALUE * VALUES)
    prefetch_start = _now(device)
    for ticket in tickets:
        store.prefetch(ticket)
    ops_with_reads = run_ops(_MAX_PREFETCH_OPS)
    read_end = _now(device)
    for ticket in tickets:
        store.fetch(ticket)
    end = _now(device)
    lost_s = end - prefetch_start - ops_with_reads * (prefetch_start - start) / max(1, ops_alone)
    return (read_end - prefetch_start) / len(tickets), lost_s / len(tickets)


def _written_tickets(store: Store, tickets: list[Ticket]) -> list[Ticket]:
    written = [ticket for ticket in tickets if not ticket.fell_back]
    if not written:
        raise StoreError(f"the {store.tier} store cannot be measured because its writes fail: see its warning")
    return written


def _default_device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _now(device: torch.device) -> float:
    if device.type != "cpu":  # not tested on an accelerator
        torch.accelerator.synchronize(device)
    return time.perf_counter()
