"""`multistage`: minimal cost over two tiers, within the slots of both."""

import random
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.chain.schedules import multistage, revolve, validate

from .exhaustive import least_cost

PRICES = [0, 0.5, 1, 2, 3, 5, 10, 30]


def checked(n, memory, disk, write, read):
    schedule = multistage(n, memory, disk, write, read)
    counts = validate(schedule, n, memory_slots=memory, disk_slots=disk, write_cost=write, read_cost=read)
    assert counts.cost == pytest.approx(schedule.cost)
    assert counts.forward_steps == schedule.forward_steps
    assert counts.peak_slots == schedule.peak_slots
    return schedule.cost


def random_case(rng, longest, most_slots):
    n = rng.randint(1, longest)
    memory, disk = rng.choice([(m, d) for m in range(most_slots + 1) for d in range(most_slots + 1) if m + d])
    return n, memory, disk, rng.choice(PRICES), rng.choice(PRICES)


@pytest.mark.parametrize("seed", range(4))
def test_cost_matches_exhaustive_search(seed):
    rng = random.Random(seed)
    for _ in range(60):
        n, memory, disk, write, read = case = random_case(rng, 7, 3)
        cheapest = least_cost(n, memory, disk, write_cost=write, read_cost=read)
        assert checked(*case) == cheapest, case


def cheapest_in_any_tier_order(n, memory, disk, write, read):
    """Return the minimal cost if every checkpoint may be in either tier or in both, in any order."""

    @cache
    def fresh(length, m, d):
        if length == 1:
            return 1
        best = in_memory(length, m, d)
        return min(best, write + on_disk(length, m, d - 1)) if d else best

    @cache
    def kept(length, m, d):  # the first state is also on disk, in a slot that d does not count
        return 1 if length == 1 else min(in_memory(length, m, d + 1), on_disk(length, m, d))

    @cache
    def in_memory(length, m, d):
        if not m:
            return float("inf")
        return min(k + fresh(length - k, m - 1, d) + fresh(k, m, d) for k in range(1, length))

    @cache
    def on_disk(length, m, d):
        return min(
            k + kept(k, m, d) + min(fresh(length - k, m, d) + read, fresh(length - k, m - 1, d) if m else float("inf"))
            for k in range(1, length)
        )

    return fresh(n, memory, disk)


def test_no_other_tier_order_is_cheaper_for_longer_chains():
    rng = random.Random(11)
    for _ in range(80):
        case = random_case(rng, 30, 4)
        assert checked(*case) == pytest.approx(cheapest_in_any_tier_order(*case)), case


def test_random_cases_stay_within_both_tiers():
    rng = random.Random(5)
    for _ in range(3000):
        checked(*random_case(rng, 40, 6))


@given(st.integers(1, 200), st.integers(0, 12), st.integers(1, 12), st.floats(0, 50), st.floats(0, 50))
@settings(max_examples=100, deadline=None)
def test_random_disk_costs(n, memory, disk, write, read):
    checked(n, memory, disk, write, read)


@given(st.integers(1, 150), st.integers(1, 10), st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_free_disk_equals_memory_and_expensive_disk_is_not_used(n, memory, disk):
    assert checked(n, memory, disk, 0, 0) == revolve(n, memory + disk).forward_steps
    expensive = multistage(n, memory, disk, 10**6, 10**6)
    assert expensive.cost == revolve(n, memory).forward_steps
    assert expensive.peak_slots.disk == 0


def test_disk_limit_where_checkpoint_schedules_exceeds_it():
    """HRevolve of the package `checkpoint_schedules` holds ten states on disk here."""
    schedule = multistage(100, 4, 4, 2, 2)
    assert validate(schedule, 100, memory_slots=4, disk_slots=4).peak_slots.disk <= 4
