"""Measured speeds are finite and positive, and measurements leave no values."""

from __future__ import annotations

import doctest
import gc
import math
from pathlib import Path

import pytest
import torch

from lowtide import LowtideWarning
from lowtide.profiling.peak_meter import PeakMeter
from lowtide.stores import DiskStore, MemoryDouble, StoreError, speed
from lowtide.stores.speed import MAX_VALUE_BYTES, VALUES, Speed, measure_store, measure_transfer_costs

from .tiers import TIERS, assert_same, random_bits, wait_until

MIB = 1 << 20


def check(speed: Speed) -> None:
    for number in (speed.out_bytes_per_s, speed.in_bytes_per_s, speed.round_trip_seconds(MIB)):
        assert math.isfinite(number)
        assert number > 0


@pytest.mark.parametrize("tier", TIERS)
def test_measure_store_on_every_tier(tier: str, tmp_path: Path) -> None:
    with TIERS[tier](tmp_path) as store:
        tensor = random_bits((1000,), torch.uint8)
        ticket = store.put(tensor, "other")
        check(measure_store(store, "2 MiB"))
        check(measure_store(store, 3))
        stats = store.stats()
        assert (stats.values, stats.stored_bytes, stats.prefetched_bytes, stats.in_flight_bytes) == (1, 1000, 0, 0)
        assert_same(store.fetch(ticket), tensor)
        store.drop(ticket)
        wait_until(lambda: store.stats().file_bytes == 0)
        assert store.stats().resident_bytes == 0


def test_measurement_is_bounded_and_leaves_the_random_state(tmp_path: Path) -> None:
    with DiskStore(tmp_path, max_in_flight_bytes="32 MiB", record_timeline=True) as store:
        state = torch.random.get_rng_state()
        with PeakMeter() as meter:
            measure_store(store, 10 * MIB + 1)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert meter.peak_bytes <= 2 * MAX_VALUE_BYTES
        gc.collect()
        assert meter.live_bytes == 0
        written = [span.nbytes for span in store.timeline() if span.kind == "write"]
        assert written == [10 * MIB // 8] * 10  # one warm-up, and the last byte needs one more value
        assert list(tmp_path.iterdir()) == []


def test_failed_measurement_leaves_no_values() -> None:
    store = MemoryDouble(refuse={"a measurement"})
    with pytest.warns(LowtideWarning), pytest.raises(StoreError, match=r"cannot be measured because its writes fail"):
        measure_store(store, MIB)
    assert store.stats().values == 0


def test_docstring_examples() -> None:
    results = doctest.testmod(speed)
    assert results.attempted
    assert not results.failed


def test_transfer_costs_are_not_negative_and_leave_no_values(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    with DiskStore(tmp_path) as store:
        costs = measure_transfer_costs(store)
        assert (
            min(costs.put_s, costs.put_s_per_byte, costs.fetch_s, costs.prefetch_s_each, costs.prefetch_s_per_byte) >= 0
        )
        assert 0 < costs.fetch_bytes_per_s < 1e12
        assert 0 < costs.prefetch_bytes_per_s < 1e12
        assert store.stats().prefetch_hits >= VALUES
        assert store.stats().prefetched_bytes == 0
        assert store.stats().values == 0
    assert torch.equal(state, torch.get_rng_state())


def test_transfer_costs_of_a_store_whose_writes_fail_raise() -> None:
    store = MemoryDouble(refuse={"a measurement"})
    with pytest.warns(LowtideWarning), pytest.raises(StoreError, match="cannot be measured"):
        measure_transfer_costs(store)
    assert store.stats().values == 0
