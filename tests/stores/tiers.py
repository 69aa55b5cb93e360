"""The tiers under test, and helpers for the store tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lowtide.stores import DeviceStore, DiskStore, HostStore, MemoryDouble, Store
from lowtide.stores._geometry import Geometry


class InstantCopy:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def order(self) -> None:
        pass


class InstantCopies:
    """Synchronous copies in CPU memory. They test the bookkeeping of the host store, not its streams."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> InstantCopy:
        target.copy_(source)
        return InstantCopy()

    def pinned(self, geometry: Geometry) -> torch.Tensor:
        return geometry.empty()


TIERS: dict[str, Callable[[Path], Store]] = {
    "device": lambda directory: DeviceStore(),
    "disk": lambda directory: DiskStore(directory, max_in_flight_bytes="1 MiB", max_prefetch_bytes="512 KiB"),
    "disk, one thread, small limits": lambda directory: DiskStore(directory, max_in_flight_bytes=2048, threads=1),
    "host, instant copies": lambda directory: HostStore(max_in_flight_bytes=4096, copies=InstantCopies()),
    "memory double": lambda directory: MemoryDouble(),
}
if torch.accelerator.is_available():
    TIERS["host"] = lambda directory: HostStore(max_in_flight_bytes="1 MiB")

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor with random bits, including NaNs."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize
    for n in shape:
        count *= n
    top = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device=DEVICE)
    return raw.view(dtype).view(shape).to(DEVICE)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert the same bits, dtype, layout and device."""
    assert got.dtype is expected.dtype
    assert got.shape == expected.shape
    assert got.stride() == expected.stride()
    assert got.device == expected.device
    assert not got.requires_grad
    nbytes = expected.numel() * expected.itemsize
    bits = [
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(
            t.untyped_storage(), t.storage_offset() * t.itemsize, (nbytes,), (1,)
        )
        for t in (got, expected)
    ]
    assert torch.equal(*bits)


def flush(store: Store) -> None:
    """Wait for all writes."""
    if isinstance(store, DiskStore):
        store.flush()


def when_thread_waits(store: DiskStore, act: Callable[[], object], after_seconds: float = 0.02) -> threading.Thread:
    """Call `act` in a new thread, `after_seconds` after a thread has started to wait for the store."""

    def watch() -> None:
        wait_until(lambda: len(store.queue.waiters) > 0)
        time.sleep(after_seconds)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def wait_until(ready: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until a background thread makes `ready` true."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"not ready after {seconds} seconds"
        time.sleep(0.002)
