"""`multistage` is the cheapest over two tiers, and exceeds neither."""

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
def test_no_schedule_at_all_is_cheaper(seed):
    rng = random.Random(seed)
    for _ in range(60):
        n, memory, disk, write, read = case = random_case(rng, 7, 3)
        cheapest = least_cost(n, memory, disk, write_cost=write, read_cost=read)
        assert checked(*case) == cheapest, case


def cheapest_of_either_order(n, memory, disk, write, read):
    """The optimum where any checkpoint may be in either tier, or in both, without an order of tiers."""

    @cache
    def fresh(length, m, d):
        if length == 1:
            return 1
        best = in_memory(length, m, d)
        return min(best, write + on_disk(length, m, d - 1)) if d else best

    @cache
    def kept(length, m, d):  # the first state is on disk as well, in a slot that d does not count
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


def test_on_longer_chains_no_other_order_of_tiers_is_cheaper():
    rng = random.Random(11)
    for _ in range(80):
        case = random_case(rng, 30, 4)
        assert checked(*case) == pytest.approx(cheapest_of_either_order(*case)), case


def test_thousands_of_cases_stay_within_both_tiers():
    rng = random.Random(5)
    for _ in range(3000):
        checked(*random_case(rng, 40, 6))


@given(st.integers(1, 200), st.integers(0, 12), st.integers(1, 12), st.floats(0, 50), st.floats(0, 50))
@settings(max_examples=100, deadline=None)
def test_any_prices(n, memory, disk, write, read):
    checked(n, memory, disk, write, read)


@given(st.integers(1, 150), st.integers(1, 10), st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_between_memory_alone_and_memory_throughout(n, memory, disk):
    """Free of charge the disk is as good as memory; too dear, it is not used."""
    assert checked(n, memory, disk, 0, 0) == revolve(n, memory + disk).forward_steps
    dear = multistage(n, memory, disk, 10**6, 10**6)
    assert dear.cost == revolve(n, memory).forward_steps
    assert dear.peak_slots.disk == 0


def test_the_case_in_which_a_peer_leaves_ten_states_on_disk():
    schedule = multistage(100, 4, 4, 2, 2)
    assert validate(schedule, 100, memory_slots=4, disk_slots=4).peak_slots.disk <= 4
