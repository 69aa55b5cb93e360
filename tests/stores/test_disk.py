"""The disk store respects its limits, prefetches in order and leaves no threads or files."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import ArgumentError
from lowtide.profiling.peak_meter import PeakMeter
from lowtide.stores import DiskStore, HostStore, MemoryDouble, StoreError, Ticket
from lowtide.stores._disk_entry import DiskEntry

from .tiers import assert_same, random_bits, wait_until

MIB = 1 << 20


def io_threads() -> int:
    return sum(thread.name.startswith("lowtide-") for thread in threading.enumerate())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_put_waits_at_the_in_flight_limit(tmp_path: Path) -> None:
    """Memory is measured by counting the storages that are still alive."""
    with DiskStore(tmp_path, max_in_flight_bytes=4 * MIB) as store:
        alive: list[weakref.ref[torch.UntypedStorage]] = []
        tickets, peak_bytes = [], 0
        for i in range(60):
            tensor = torch.full((MIB // 4,), float(i))
            alive.append(weakref.ref(tensor.untyped_storage()))
            tickets.append(store.put(tensor))
            del tensor
            assert store.stats().in_flight_bytes <= 4 * MIB
            alive_bytes = sum(ref() is not None for ref in alive) * MIB
            assert alive_bytes <= 4 * MIB
            peak_bytes = max(peak_bytes, alive_bytes)
        stats = store.stats()
        assert peak_bytes > 0
        assert 0 < stats.peak_in_flight_bytes <= 4 * MIB
        assert stats.put_wait_seconds > 0
        store.flush()
        assert store.stats().in_flight_bytes == store.stats().resident_bytes == 0
        assert not any(ref() is not None for ref in alive)
        assert store.stats().file_bytes == 60 * MIB
        for i, ticket in enumerate(tickets):
            assert_same(store.fetch(ticket), torch.full((MIB // 4,), float(i)))


def test_stalled_disk_blocks_only_put(tmp_path: Path) -> None:
    """The lock of the file is held, so the writers wait as they would for a slow device."""

    def interrupt(*_: object) -> None:
        raise InterruptedError

    tensors = [random_bits((MIB,), torch.uint8, i) for i in range(4)]
    previous = signal.signal(signal.SIGALRM, interrupt)
    with DiskStore(tmp_path, max_in_flight_bytes=3 * MIB) as store:
        with store.queue.file.lock:
            tickets = [store.put(tensor) for tensor in tensors[:3]]
            for ticket, tensor in zip(tickets, tensors, strict=False):
                store.prefetch(ticket)
                assert_same(store.fetch(ticket), tensor)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(InterruptedError):
                store.put(tensors[3])
            signal.signal(signal.SIGALRM, previous)
            stats = store.stats()
            assert (stats.values, stats.stored_bytes, stats.in_flight_bytes) == (3, 3 * MIB, 3 * MIB)
            store.drop(tickets.pop())  # its write has not started: there are two threads
            assert store.stats().in_flight_bytes == 2 * MIB
            tickets.append(store.put(tensors[3]))
        store.flush()
        wait_until(lambda: store.stats().values == 3)
        for ticket, i in zip(tickets, [0, 1, 3], strict=True):
            assert_same(store.fetch(ticket), tensors[i])
        stats = store.stats()
        assert (stats.stored_bytes, stats.resident_bytes) == (3 * MIB, 0)


def test_several_threads_can_fetch_the_same_value(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_prefetch_bytes=MIB) as store:
        tensors = [random_bits((MIB // 2,), torch.uint8, i) for i in range(4)]
        tickets = [store.put(tensor) for tensor in tensors]
        store.flush()
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(10):
                    for ticket, tensor in zip(tickets, tensors, strict=True):
                        store.prefetch(ticket)
                        assert_same(store.fetch(ticket), tensor)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        for ticket in tickets:
            store.drop(ticket)
        wait_until(lambda: store.stats().prefetched_bytes == store.stats().file_bytes == 0)
        assert store.stats().peak_prefetched_bytes <= MIB


def test_value_larger_than_the_limit_is_written_before_put_returns(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes=MIB) as store:
        tensor = random_bits((3 * MIB + 5,), torch.uint8)
        storage = weakref.ref(tensor.untyped_storage())
        ticket = store.put(tensor)
        copy = tensor.clone()
        del tensor
        assert storage() is None
        assert store.stats().peak_in_flight_bytes == 0
        store.prefetch(ticket)  # larger than max_prefetch_bytes, too: ignored
        assert store.stats().prefetched_bytes == 0
        assert_same(store.fetch(ticket), copy)


def test_prefetch_reads_in_order_up_to_its_limit(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes=8 * MIB, max_prefetch_bytes=3 * MIB, threads=1) as store:
        tensors = [random_bits((MIB,), torch.uint8, i) for i in range(8)]
        tickets = [store.put(tensor) for tensor in tensors]
        store.flush()
        for ticket in reversed(tickets):
            store.prefetch(ticket)
        for ticket, tensor in zip(reversed(tickets), reversed(tensors), strict=True):
            wait_until(lambda: store.queue.readers.is_idle())
            assert store.stats().prefetched_bytes <= 3 * MIB
            assert_same(store.fetch(ticket), tensor)
            store.drop(ticket)
        stats = store.stats()
        assert stats.peak_prefetched_bytes == 3 * MIB
        assert stats.prefetched_bytes == 0
        assert stats.prefetch_hits >= 6  # most values were read or being read when fetched
        wait_until(lambda: store.stats().file_bytes == 0)


def test_prefetch_of_a_value_still_in_memory_reads_nothing(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        tensor = random_bits((100,), torch.uint8)
        ticket = store.put(tensor)
        store.prefetch(ticket)
        assert_same(store.fetch(ticket), tensor)
        store.flush()
        store.prefetch(ticket)
        store.prefetch(ticket)
        store.drop(ticket)
        wait_until(lambda: store.stats().prefetched_bytes == 0)


def test_tensors_are_allocated_in_the_calling_thread(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        ticket = store.put(torch.zeros(1000))
        store.flush()
        with PeakMeter() as meter:
            store.prefetch(ticket)
        assert meter.peak_bytes == 4000


def test_drop_cancels_a_queued_write(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes="64 MiB", threads=1) as store:
        tickets = [store.put(torch.zeros(4 * MIB)) for _ in range(4)]
        for ticket in tickets:
            store.drop(ticket)
        wait_until(lambda: store.stats().in_flight_bytes == 0)
        wait_until(lambda: store.stats().file_bytes == 0)
        assert_same(store.fetch(store.put(torch.ones(3))), torch.ones(3))


def test_close_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    threads, files = io_threads(), open_files()
    store = DiskStore(tmp_path, threads=3)
    tickets = [store.put(torch.zeros(MIB)) for _ in range(8)]
    assert io_threads() == threads + 6
    started = time.perf_counter()
    store.close()
    assert time.perf_counter() - started < 2
    assert (io_threads(), open_files()) == (threads, files)
    assert list(tmp_path.iterdir()) == []
    del tickets


def test_collected_store_leaves_no_thread_and_no_file(tmp_path: Path) -> None:
    gc.collect()
    threads, files = io_threads(), open_files()
    for _ in range(5):
        store = DiskStore(tmp_path)
        ticket = store.put(torch.zeros(MIB))
        cycle = [store, ticket]
        cycle.append(cycle)
        del store, ticket, cycle
    # Repeated: gc.collect() does nothing while another thread collects.
    wait_until(lambda: gc.collect() >= 0 and io_threads() == threads)
    wait_until(lambda: open_files() == files)


def test_ticket_keeps_its_store_alive(tmp_path: Path) -> None:
    ticket = DiskStore(tmp_path).put(torch.ones(5))
    gc.collect()
    assert_same(ticket.store.fetch(ticket), torch.ones(5))


def test_close_wakes_a_waiting_put(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes=4 * MIB, threads=1) as store:
        errors: list[BaseException] = []
        tickets = []

        def put() -> None:
            try:
                while True:
                    tickets.append(store.put(torch.zeros(MIB)))
            except StoreError as error:
                errors.append(error)

        thread = threading.Thread(target=put)
        thread.start()
        time.sleep(0.05)
        store.close()
        thread.join(5)
        assert not thread.is_alive()
        assert "closed" in str(errors[0])


def test_error_in_a_background_thread_is_raised(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        ticket = store.put(torch.ones(3))
        store.queue.writers.submit(lambda: [][0])
        wait_until(lambda: store.queue.writers.failure is not None)
        with pytest.raises(StoreError, match=r"background thread of the disk store failed: IndexError") as caught:
            store.fetch(ticket)
        assert isinstance(caught.value.__cause__, IndexError)
        store.queue.writers.failures.clear()


def test_invalid_arguments() -> None:
    with pytest.raises(ArgumentError, match="at least one thread"):
        DiskStore(threads=0)
    with pytest.raises(ArgumentError, match=r"0\.5"):
        DiskStore(max_in_flight_bytes=0.5)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_host_store_is_refused_without_an_accelerator() -> None:
    with pytest.raises(ArgumentError, match="this machine has none: values are already in host memory"):
        HostStore()


def test_memory_double_refuses_and_damages_on_request() -> None:
    store = MemoryDouble(refuse={"b"})
    a = store.put(torch.ones(2), "a")
    with pytest.warns(UserWarning, match="refuses 'b', as the test requested"):
        b = store.put(torch.ones(2), "b")
    assert (a.fell_back, b.fell_back) == (False, True)
    assert store.stats().resident_bytes == 8
    store.damage(a)
    with pytest.raises(StoreError, match=r"'a'.*is damaged"):
        store.fetch(a)
    assert_same(store.fetch(b), torch.ones(2))
    assert store.calls == [("put", "a"), ("put", "b"), ("fetch", "a"), ("fetch", "b")]


def test_dispatch_mode_can_use_the_store_while_the_store_allocates(tmp_path: Path) -> None:
    """A memory budget does this: an allocation makes it offload other values."""

    class Evicting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.empty_strided.default:
                evicted.append(store.put(victims.pop()))
            return func(*args, **(kwargs or {}))

    with DiskStore(tmp_path) as store:
        victims = [torch.ones(5), torch.ones(6)]
        evicted: list[Ticket] = []
        tickets = [store.put(torch.zeros(n)) for n in (3, 4)]
        store.flush()
        with Evicting():  # type: ignore[no-untyped-call]
            store.prefetch(tickets[0])
            assert store.fetch(tickets[1]).shape == (4,)
        assert_same(store.fetch(tickets[0]), torch.zeros(3))
        assert [ticket.nbytes for ticket in evicted] == [24, 20]


@pytest.mark.parametrize("error", [MemoryError, KeyError])
def test_prefetch_without_memory_is_skipped(tmp_path: Path, error: type[Exception]) -> None:
    class Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise error("no memory")

    with DiskStore(tmp_path) as store:
        tensors = [random_bits((100,), torch.uint8, i) for i in range(3)]
        tickets = [store.put(tensor.clone()) for tensor in tensors]
        store.flush()
        with Refusing(), pytest.raises(error) if error is KeyError else nullcontext():  # type: ignore[no-untyped-call]
            store.prefetch(tickets[0])
        with Refusing(), pytest.raises(error):  # type: ignore[no-untyped-call]
            store.fetch(tickets[1])
        assert store.stats().prefetched_bytes == 0
        for ticket, tensor in zip(tickets, tensors, strict=True):
            assert_same(store.fetch(ticket), tensor)


def test_value_dropped_during_a_fetch_is_read_completely(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes=64 * MIB) as store:
        tensor = random_bits((64 * MIB,), torch.uint8)
        ticket = store.put(tensor)
        store.flush()
        entry = cast(DiskEntry, ticket.entry)
        got: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: got.append(store.fetch(ticket)))
        thread.start()
        while thread.is_alive() and entry.readers == 0:
            pass
        store.drop(ticket)
        thread.join()
        assert_same(got[0], tensor)
        wait_until(lambda: store.stats().file_bytes == 0)
