"""Tests that every tier must pass."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from lowtide import ArgumentError
from lowtide.stores import Store, StoreError, Ticket

from ..codecs.tensors import DTYPES
from .tiers import DEVICE, TIERS, assert_same, flush, random_bits, wait_until

SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7, 5), (2, 3, 4, 5)]


def test_fetch_returns_the_value_that_was_put(store: Store) -> None:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        tensor = random_bits(shape, dtype)
        ticket = store.put(tensor, "x")
        assert ticket.name == "x"
        assert ticket.nbytes == tensor.nbytes
        assert not ticket.fell_back
        assert_same(store.fetch(ticket), tensor)
        flush(store)
        assert_same(store.fetch(ticket), tensor)
        store.prefetch(ticket)
        assert_same(store.fetch(ticket), tensor)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: random_bits((4, 6), torch.float32).t(),
    "channels last": lambda: random_bits((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last),
    "permuted": lambda: random_bits((2, 3, 4), torch.int16).permute(2, 0, 1),
    "unusual stride": lambda: random_bits((1, 5), torch.float64).as_strided((1, 5), (77, 1)),
    "part of a storage": lambda: random_bits((10, 6), torch.float32)[4:8],
    "parameter": lambda: torch.nn.Parameter(random_bits((3, 3), torch.float32)),
    "with history": lambda: random_bits((3, 3), torch.float32).nan_to_num().requires_grad_().exp(),
}


def test_layouts_are_restored(store: Store) -> None:
    for make in LAYOUTS.values():
        tensor = make()
        ticket = store.put(tensor)
        assert_same(store.fetch(ticket), tensor.detach())
        flush(store)
        assert_same(store.fetch(ticket), tensor.detach())


REFUSED: list[tuple[Callable[[], torch.Tensor], str]] = [
    (lambda: torch.zeros(3).expand(4, 3), r"fill their memory, not strides \(0, 1\) for shape \(4, 3\)"),
    (lambda: torch.zeros(8)[::2], "put the whole storage and take the view after fetching"),
    (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "resolve_conj"),
    (lambda: torch.zeros(3, 3).to_sparse(), "not a sparse_coo one"),
    (lambda: torch.zeros(3, device="meta"), "on meta"),
    (lambda: torch.zeros(3).as_subclass(type("Fancy", (torch.Tensor,), {})), "plain tensors, not Fancy"),
]


def test_unsupported_tensors_are_refused(store: Store) -> None:
    for make, message in REFUSED:
        with pytest.raises(ArgumentError, match=message):
            store.put(make())
    assert store.stats().values == 0


def test_dropped_value_cannot_be_fetched(store: Store) -> None:
    ticket = store.put(torch.zeros(3, device=DEVICE), "x")
    store.drop(ticket)
    store.drop(ticket)
    for call in (store.fetch, store.prefetch):
        with pytest.raises(ArgumentError, match=r"'x' \(float32 of shape \(3,\)\) was dropped"):
            call(ticket)
    assert "dropped" in repr(ticket)


def test_ticket_of_another_store_is_refused(store: Store, tmp_path: Path) -> None:
    with TIERS["device"](tmp_path) as other:
        ticket = other.put(torch.zeros(3))
        for call in (store.fetch, store.prefetch, store.drop):
            with pytest.raises(ArgumentError, match="belongs to another store"):
                call(ticket)


def test_closed_store_raises(store: Store) -> None:
    ticket = store.put(torch.zeros(3, device=DEVICE))
    store.close()
    store.close()
    store.drop(ticket)
    for call in (lambda: store.put(torch.zeros(3)), lambda: store.fetch(ticket), lambda: store.prefetch(ticket)):
        with pytest.raises(StoreError, match="is closed"):
            call()
    stats = store.stats()
    assert (stats.values, stats.stored_bytes, stats.resident_bytes, stats.put_bytes) == (0, 0, 0, 12)


def test_drop_and_close_release_memory(store: Store) -> None:
    def put() -> tuple[Ticket, weakref.ref[torch.UntypedStorage]]:
        tensor = torch.zeros(300, device=DEVICE)
        return store.put(tensor), weakref.ref(tensor.untyped_storage())

    ticket, dropped = put()
    other, closed = put()
    store.drop(ticket)
    wait_until(lambda: dropped() is None)
    store.close()
    assert closed() is None
    del other


def test_collected_ticket_drops_its_value(store: Store) -> None:
    tensor = torch.zeros(300, device=DEVICE)
    storage = weakref.ref(tensor.untyped_storage())
    ticket = store.put(tensor)
    del tensor
    assert store.stats().values == 1
    del ticket
    gc.collect()
    wait_until(lambda: store.stats().values == 0)
    wait_until(lambda: storage() is None)
    assert store.stats().stored_bytes == 0


def test_statistics(store: Store) -> None:
    a, b = store.put(torch.zeros(10, device=DEVICE)), store.put(torch.zeros(20, device=DEVICE))
    store.fetch(a)
    store.fetch(a)
    store.drop(b)
    stats = store.stats()
    assert (stats.values, stats.stored_bytes, stats.put_bytes, stats.fetched_bytes) == (1, 40, 120, 80)
    assert stats.tier == store.tier


def test_concurrent_threads(store: Store) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(25):
                tensors = [random_bits((50 + seed, n), torch.float32, 100 * seed + i) for n in (1, 3, 9)]
                tickets = [store.put(tensor) for tensor in tensors]
                for ticket in reversed(tickets):
                    store.prefetch(ticket)
                for ticket, tensor in zip(reversed(tickets), reversed(tensors), strict=True):
                    assert_same(store.fetch(ticket), tensor)
                    store.drop(ticket)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    stats = store.stats()
    assert (stats.values, stats.stored_bytes, stats.prefetched_bytes) == (0, 0, 0)


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "fetch", "fetch", "prefetch", "drop", "collect", "flush"]),
        st.integers(0, 30),
        st.sampled_from([0, 1, 100, 1000, 5000]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("tier", TIERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_any_sequence_of_calls_matches_a_dictionary(
    tier: str, tmp_path: Path, calls: list[tuple[str, int, int]]
) -> None:
    with TIERS[tier](tmp_path) as store:
        stored: list[tuple[Ticket, torch.Tensor]] = []
        for step, (call, which, size) in enumerate(calls):
            if call == "put":
                tensor = random_bits((size,), torch.uint8, step)
                stored.append((store.put(tensor.clone(), str(step)), tensor))
            elif call == "flush":
                flush(store)
            elif stored:
                ticket, tensor = stored[which % len(stored)]
                if call == "fetch":
                    assert_same(store.fetch(ticket), tensor)
                elif call == "prefetch":
                    store.prefetch(ticket)
                else:
                    if call == "drop":
                        store.drop(ticket)
                    del stored[which % len(stored)], ticket
        stored_bytes = sum(tensor.nbytes for _, tensor in stored)
        wait_until(lambda: (store.stats().stored_bytes, store.stats().values) == (stored_bytes, len(stored)))
        for ticket, tensor in stored:
            assert_same(store.fetch(ticket), tensor)
