"""The timeline records writes, reads and waits, and nothing unless enabled."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest
import torch

from lowtide.stores import DiskStore, Span
from lowtide.stores._timeline import LIMIT, Timeline

from .tiers import random_bits, wait_until, when_thread_waits

MIB = 1 << 20


def spans_of_kind(store: DiskStore, kind: str) -> list[Span]:
    return [span for span in store.timeline() if span.kind == kind]


def test_timeline_is_off_by_default(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        ticket = store.put(torch.ones(1000))
        store.flush()
        store.fetch(ticket)
        assert store.timeline() == ()


def test_timeline_records_transfers_and_waits(tmp_path: Path) -> None:
    before = time.perf_counter()
    with DiskStore(tmp_path, max_in_flight_bytes=2 * MIB, threads=1, record_timeline=True) as store:
        with store.queue.file.lock:  # stalls the disk
            tickets = [store.put(random_bits((MIB,), torch.uint8, i), f"x{i}") for i in range(2)]
        assert not spans_of_kind(store, "wait for write")  # below the limit
        store.flush()
        lock = store.queue.file.lock
        lock.acquire()
        tickets += [store.put(random_bits((MIB,), torch.uint8, i), f"x{i}") for i in range(2, 4)]
        when_thread_waits(store, lock.release)
        tickets.append(store.put(random_bits((MIB,), torch.uint8, 4), "x4"))
        (blocked,) = [span for span in spans_of_kind(store, "wait for write") if span.name == "x4"]
        assert blocked.nbytes == MIB
        assert blocked.seconds >= 0.02
        store.drain(5 * MIB)
        writes = spans_of_kind(store, "write")
        assert [(span.name, span.nbytes) for span in writes] == [(f"x{i}", MIB) for i in range(5)]
        assert any(write.start_seconds < blocked.end_seconds and write.end_seconds > blocked.start_seconds
                   for write in writes)  # fmt: skip

        store.fetch(tickets[0])
        (read,), (wait,) = spans_of_kind(store, "read"), spans_of_kind(store, "wait for read")
        assert (read.name, read.nbytes, wait.name) == ("x0", MIB, "x0")
        assert wait.start_seconds <= read.start_seconds < read.end_seconds <= wait.end_seconds
        store.prefetch(tickets[1])
        wait_until(lambda: store.is_resident(tickets[1]))
        store.fetch(tickets[1])
        assert [span.name for span in spans_of_kind(store, "read")] == ["x0", "x1"]
        assert len(spans_of_kind(store, "wait for read")) == 1  # the other fetch was prefetched
    spans = store.timeline()  # also after close
    assert len(spans) >= 9
    ends = [span.end_seconds for span in spans if span.kind == "write"]
    assert ends == sorted(ends)
    assert all(before < span.start_seconds <= span.end_seconds < time.perf_counter() for span in spans)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spans[0].nbytes = 3  # type: ignore[misc]


def test_timeline_is_bounded_and_can_be_read_while_it_grows() -> None:
    timeline = Timeline(enabled=True)
    threads = [threading.Thread(target=lambda: [timeline.add("read", 0.0, n) for n in range(LIMIT)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        timeline.spans()
    assert len(timeline.spans()) == LIMIT
