"""Residency, bytes to fetch, and waiting for free memory: the interface for memory budgets."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch

from lowtide import ArgumentError
from lowtide.profiling.peak_meter import PeakMeter
from lowtide.stores import DeviceStore, DiskStore, HostStore, MemoryDouble, Store, StoreError

from .tiers import InstantCopies, InstantCopy, assert_same, random_bits, wait_until, when_thread_waits

MIB = 1 << 20


def test_bytes_to_fetch_on_every_tier(store: Store) -> None:
    tensor = random_bits((1000,), torch.uint8)
    ticket = store.put(tensor, "x")
    store.drain(1000)
    in_memory = isinstance(store, DeviceStore) and not isinstance(store, MemoryDouble)
    assert store.is_resident(ticket) == in_memory
    assert store.bytes_to_fetch(ticket) == (0 if in_memory else 1000)
    with PeakMeter() as meter:
        got = store.fetch(ticket)
    if not in_memory:
        assert meter.peak_bytes == 1000
    assert store.bytes_to_fetch(ticket) == (0 if in_memory else 1000)  # the store does not keep a fetched tensor
    assert_same(got, tensor)
    store.drop(ticket)
    for call in (store.is_resident, store.bytes_to_fetch):
        with pytest.raises(ArgumentError, match="was dropped"):
            call(ticket)
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.drain(1)


def test_drain_returns_on_every_tier(store: Store) -> None:
    assert store.drain(10**9) == 0
    tickets = [store.put(random_bits((500,), torch.uint8, i)) for i in range(8)]
    assert 0 <= store.drain(10**9) <= 4000
    assert store.drain(10**9) == 0
    assert store.stats().in_flight_bytes == 0
    del tickets


def test_second_eviction_needs_no_write(store: Store) -> None:
    """With the ticket, a fetched tensor can be freed and fetched again."""
    tensor = random_bits((1000,), torch.uint8)
    ticket = store.put(tensor.clone())
    store.drain(1000)
    before = store.stats()
    for n in range(3):
        fetched = store.fetch(ticket)
        assert_same(fetched, tensor)
        storage = weakref.ref(fetched.untyped_storage())
        del fetched
        if not isinstance(store, DeviceStore):
            assert storage() is None
        stats = store.stats()
        assert (stats.put_bytes, stats.file_bytes, stats.values) == (1000, before.file_bytes, 1)
        assert stats.fetched_bytes == 1000 * (n + 1)
        assert stats.resident_bytes == before.resident_bytes


def test_residency_of_a_value_on_disk(tmp_path: Path) -> None:
    with DiskStore(tmp_path, threads=1, record_timeline=True) as store:
        tensor = random_bits((MIB,), torch.uint8)
        with store.queue.file.lock:  # stalls the disk
            ticket = store.put(tensor)
            assert store.is_resident(ticket)
            assert store.bytes_to_fetch(ticket) == 0
            assert store.fetch(ticket) is tensor
        store.flush()
        assert not store.is_resident(ticket)
        assert store.bytes_to_fetch(ticket) == MIB
        store.prefetch(ticket)
        assert store.bytes_to_fetch(ticket) == 0  # allocated, read or not
        wait_until(lambda: store.is_resident(ticket))
        for _ in range(2):
            assert_same(store.fetch(ticket), tensor)
            assert not store.is_resident(ticket)
        kinds = [span.kind for span in store.timeline()]
        assert kinds.count("write") == 1
        assert kinds.count("read") == 2


def test_drain_waits_for_the_requested_bytes_only(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes=8 * MIB, threads=1) as store:
        alive: list[weakref.ref[torch.UntypedStorage]] = []
        tickets = []
        lock = store.queue.file.lock
        lock.acquire()
        for i in range(4):
            tensor = random_bits((MIB,), torch.uint8, i)
            alive.append(weakref.ref(tensor.untyped_storage()))
            tickets.append(store.put(tensor))
            del tensor
        assert store.drain(0) == 0
        assert sum(ref() is not None for ref in alive) == 4
        when_thread_waits(store, lock.release)
        started = time.perf_counter()
        assert store.drain(2 * MIB) >= 2 * MIB
        assert time.perf_counter() - started >= 0.02
        assert sum(ref() is not None for ref in alive) <= 2  # counts live storages
        assert store.drain(100 * MIB) <= 2 * MIB
        assert sum(ref() is not None for ref in alive) == 0
        assert store.drain(1) == 0
        for i, ticket in enumerate(tickets):
            assert_same(store.fetch(ticket), random_bits((MIB,), torch.uint8, i))


def test_dropped_values_count_as_drained(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes=8 * MIB, threads=1) as store:
        with store.queue.file.lock:
            tickets = [store.put(random_bits((MIB,), torch.uint8, i)) for i in range(4)]
            watch = when_thread_waits(store, tickets.pop)  # its write has not started: there is one thread
            assert store.drain(MIB) == MIB
            watch.join()
            assert store.stats().in_flight_bytes == 3 * MIB
        store.flush()


def test_drain_returns_when_writes_fail(small_disk: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with DiskStore(small_disk, max_in_flight_bytes=64 * MIB, threads=1) as store:
            tickets = [store.put(random_bits((3 * MIB,), torch.uint8, i)) for i in range(4)]
            assert store.drain(64 * MIB) <= 3 * MIB
            assert [ticket.fell_back for ticket in tickets] == [False, True, True, True]
            assert [store.bytes_to_fetch(ticket) for ticket in tickets] == [3 * MIB, 0, 0, 0]
            assert store.drain(1) == 0
            for i, ticket in enumerate(tickets):
                assert_same(store.fetch(ticket), random_bits((3 * MIB,), torch.uint8, i))


def test_close_wakes_a_waiting_drain(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_in_flight_bytes=8 * MIB, threads=1)
    errors: list[BaseException] = []

    def drain() -> None:
        try:
            store.drain(MIB)
        except StoreError as error:
            errors.append(error)

    lock = store.queue.file.lock
    with lock:
        ticket = store.put(random_bits((MIB,), torch.uint8))
        thread = threading.Thread(target=drain)
        thread.start()
        closing = when_thread_waits(store, store.close)
        thread.join(5)
        assert not thread.is_alive()
    closing.join(5)
    assert "closed by another thread" in str(errors[0])
    del ticket


class SlowCopy(InstantCopy):
    ended = False

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = True


class SlowCopies(InstantCopies):
    """Copies that end when `wait` is called."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> InstantCopy:
        super().start(target, source)
        return SlowCopy()


def test_host_store_waits_for_the_oldest_copies() -> None:
    store = HostStore(copies=SlowCopies())
    tickets = [store.put(random_bits((100,), torch.uint8, i)) for i in range(4)]
    assert store.drain(150) == 200
    assert store.stats().in_flight_bytes == 200
    assert store.drain(1000) == 200
    assert store.drain(1000) == 0
    store.prefetch(tickets[0])
    assert store.is_resident(tickets[0])
    assert store.bytes_to_fetch(tickets[0]) == 0
    assert not store.is_resident(tickets[1])
    store.close()
