"""Callbacks that use a store while it allocates or frees memory, and values changed after put."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.stores import DamagedValueError, DeviceStore, DiskStore, HostStore, Store, StoreError, Ticket

from .tiers import TIERS, InstantCopies, InstantCopy, assert_same, random_bits, wait_until

MIB = 1 << 20


def within(seconds: float, work: Callable[[], object]) -> None:
    """Run `work` in a thread. Fail if it takes longer than `seconds`."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"no result after {seconds} seconds"
    if errors:
        raise errors[0]


@pytest.fixture(params=["device", "disk", "memory double", "host, instant copies"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = TIERS[request.param](tmp_path)
    yield store
    within(5, store.close)


@pytest.mark.parametrize("way", ["drain", "drop", "collect", "close"])
def test_memory_is_freed_without_a_lock(store: Store, way: str) -> None:
    """A finalizer of the storage can read the statistics of the store."""
    seen_values: list[int] = []

    def put() -> Ticket:
        tensor = random_bits((5000,), torch.uint8)
        weakref.finalize(tensor.untyped_storage(), lambda: seen_values.append(store.stats().values)).atexit = False
        return store.put(tensor)

    def work() -> None:
        tickets = [put()]
        if way == "drain":
            store.drain(5000)
        elif way == "drop":
            store.drop(tickets[0])
        elif way == "collect":
            tickets.clear()
        else:
            store.close()
        if way != "drain" or isinstance(store, DiskStore):
            wait_until(lambda: len(seen_values) == 1)

    within(5, work)


def test_callback_in_a_thread_of_the_store_cannot_wait_for_the_store(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes=MIB, threads=1) as store:
        errors: list[BaseException] = []

        def finalize() -> None:
            for call in (lambda: store.drain(1), lambda: store.put(torch.ones(MIB // 4)), store.flush):
                try:
                    call()
                except StoreError as error:
                    errors.append(error)

        tensor = random_bits((MIB,), torch.uint8)
        weakref.finalize(tensor.untyped_storage(), finalize).atexit = False
        ticket = store.put(tensor)
        del tensor
        within(5, store.flush)
        assert [str(error).split(":")[0] for error in errors] == [
            "a thread of the disk store cannot wait for itself"
        ] * 3
        assert_same(store.fetch(ticket), random_bits((MIB,), torch.uint8))


def test_collected_ticket_frees_memory_while_the_disk_is_stalled(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes=8 * MIB, threads=1) as store:
        tensors = [random_bits((MIB,), torch.uint8, i) for i in range(3)]
        storage = weakref.ref(tensors[2].untyped_storage())
        release = threading.Event()
        store.queue.readers.submit(lambda: release.wait() and None)
        with store.queue.file.lock:
            tickets = [store.put(tensors.pop(0)) for _ in range(3)]
            tickets.pop()
            assert storage() is None
            assert store.stats().in_flight_bytes == 2 * MIB
        release.set()
        store.flush()


class Evicting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `evict` at each allocation, as a memory budget does."""

    def __init__(self, evict: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.evict = evict

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty_strided.default:
            self.evict()
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_can_use_the_host_store_while_the_store_allocates() -> None:
    store = HostStore(copies=InstantCopies())
    tickets = [store.put(random_bits((n,), torch.uint8, n)) for n in (3, 4, 5)]
    victims = [random_bits((n,), torch.uint8) for n in range(10)]
    evicted: list[Ticket] = []
    depth: list[int] = []

    def evict() -> None:
        if not depth:  # put allocates, too
            depth.append(1)
            evicted.append(store.put(victims.pop()))
            store.drain(1)
            depth.pop()

    def work() -> None:
        with Evicting(evict):
            store.prefetch(tickets[0])
            assert_same(store.fetch(tickets[1]), random_bits((4,), torch.uint8, 4))

    within(5, work)
    assert len(evicted) == 2
    assert_same(store.fetch(tickets[0]), random_bits((3,), torch.uint8, 3))
    assert store.stats().prefetched_bytes == 0
    assert store.stats().stored_bytes == 3 + 4 + 5 + 9 + 8


class NoMemory(InstantCopies):
    def start(self, target: torch.Tensor, source: torch.Tensor) -> InstantCopy:
        raise RuntimeError("out of memory")


def test_failed_host_put_changes_no_statistics() -> None:
    store = HostStore(copies=NoMemory())
    with pytest.raises(RuntimeError, match="out of memory"):
        store.put(torch.zeros(10))
    stats = store.stats()
    assert (stats.values, stats.stored_bytes, stats.put_bytes, stats.in_flight_bytes) == (0, 0, 0, 0)


def test_host_prefetch_without_memory_is_skipped() -> None:
    copies = InstantCopies()
    store = HostStore(copies=copies)
    tensor = random_bits((10,), torch.uint8)
    tickets = [store.put(tensor), store.put(tensor)]
    store.copies = NoMemory()
    store.prefetch(tickets[0])
    with pytest.raises(RuntimeError, match="out of memory"):
        store.fetch(tickets[1])
    assert store.stats().prefetched_bytes == 0
    store.copies = copies
    for ticket in tickets:
        assert_same(store.fetch(ticket), tensor)


@pytest.mark.parametrize("when", ["before it is written", "while it is written"])
def test_value_changed_after_put_raises(tmp_path: Path, when: str) -> None:
    """Detected by the version counter of torch. A wrong value would be a wrong gradient."""
    with DiskStore(tmp_path, threads=1) as store:
        tensor = random_bits((MIB,), torch.uint8)
        with store.queue.file.lock:  # stalls the disk
            ticket = store.put(tensor, "layer3.out")
            tensor.add_(1)
            if when == "before it is written":
                with pytest.raises(DamagedValueError, match=r"'layer3.out' .*changed in place after it was put"):
                    store.fetch(ticket)
        store.flush()
        del tensor
        with pytest.raises(DamagedValueError, match=r"'layer3.out' .*changed in place after it was put"):
            store.fetch(ticket)
        store.prefetch(ticket)
        store.drop(ticket)
        wait_until(lambda: store.stats().file_bytes == 0)
        assert store.stats().resident_bytes == 0


def test_value_changed_in_the_device_store_raises() -> None:
    store = DeviceStore()
    tensor = torch.ones(3)
    ticket = store.put(tensor, "x")
    tensor.add_(1)
    with pytest.raises(DamagedValueError, match="changed in place after it was put"):
        store.fetch(ticket)


def test_inference_tensors_have_no_version_and_are_stored(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store, torch.inference_mode():
        tensor = random_bits((100,), torch.float32)
        ticket = store.put(tensor)
        store.flush()
        assert_same(store.fetch(ticket), tensor)


def test_value_with_a_freed_storage_raises(tmp_path: Path) -> None:
    """FSDP resizes the storages of parameters to 0 while the tensors exist."""
    with DiskStore(tmp_path, threads=1) as store:
        tensor = random_bits((MIB,), torch.uint8)
        with store.queue.file.lock:
            blocker = store.put(random_bits((MIB,), torch.uint8))
            ticket = store.put(tensor, "weight")
            tensor.untyped_storage().resize_(0)
        store.flush()
        with pytest.raises(DamagedValueError, match=r"'weight' .*its memory was freed"):
            store.fetch(ticket)
        store.fetch(blocker)
