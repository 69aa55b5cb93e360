"""`revolve`: binomial optimum, streamed. `periodic`, `sqrt` and `keep_all`: steps and slots."""

import tracemalloc
from itertools import islice
from math import isqrt

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.chain.schedules import Advance, Reverse, Store, keep_all, periodic, revolve, sqrt, validate

from .exhaustive import least_cost

# Optimum of Griewank and Walther, with the initial state as a slot and with taped steps.
OPTIMUM = {
    (100, 5): 416, (100, 10): 322, (100, 50): 248,
    (1000, 5): 7284, (1000, 10): 4636, (1000, 50): 2948,
    (10000, 5): 122868, (10000, 10): 67624, (10000, 50): 38622,
}  # fmt: skip


@pytest.mark.parametrize(("n", "slots"), OPTIMUM)
def test_steps_match_the_published_optimum(n, slots):
    schedule = revolve(n, slots)
    assert schedule.forward_steps == OPTIMUM[n, slots]
    assert validate(schedule, n, slots=slots).forward_steps == OPTIMUM[n, slots]


@pytest.mark.parametrize("n", range(1, 13))
def test_steps_match_exhaustive_search(n):
    for slots in range(1, 7):
        assert revolve(n, slots).forward_steps == least_cost(n, slots), (n, slots)


@given(st.integers(1, 3000), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_valid_and_as_predicted(n, slots):
    schedule = revolve(n, slots)
    counts = validate(schedule, n, slots=slots)
    assert (counts.forward_steps, counts.peak_slots) == (schedule.forward_steps, schedule.peak_slots)


@given(st.integers(2, 10**9), st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_formula_satisfies_the_recursion_of_the_optimum(n, slots):
    """The first advance of the schedule is optimal, and no other one is better."""
    first = next(action for action in revolve(n, slots) if isinstance(action, Advance)).stop

    def with_first(k):
        right = revolve(n - k, slots - 1).forward_steps if slots > 1 or n - k == 1 else float("inf")
        return k + right + revolve(k, slots).forward_steps

    best = revolve(n, slots).forward_steps
    assert with_first(first) == best
    for k in {1, n // 3 or 1, n // 2, n - 1, max(1, first - 1), min(n - 1, first + 1)}:
        assert with_first(k) >= best


def test_long_chain_is_streamed():
    n, slots = 200_000, 12
    tracemalloc.start()
    try:
        reversed_steps = sum(isinstance(action, Reverse) for action in revolve(n, slots))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reversed_steps == n
    assert peak_bytes < 20_000


def test_million_steps_start_at_once_with_known_forward_steps():
    schedule = revolve(1_000_000, 30)
    assert list(islice(schedule, 1)) == [Store(0)]
    # C(35, 5) = 324,632 < n ≤ C(36, 6) = 1,947,792, so r = 6 and the formula gives 7n − C(36, 5).
    assert schedule.forward_steps == 7 * 1_000_000 - 376_992


@given(st.integers(1, 400), st.integers(1, 450))
@settings(max_examples=80, deadline=None)
def test_periodic_is_valid_and_as_predicted(n, period):
    schedule = periodic(n, period)
    counts = validate(schedule, n)
    assert (counts.forward_steps, counts.peak_slots) == (schedule.forward_steps, schedule.peak_slots)
    assert counts.forward_steps <= 3 * n


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 99, 100, 101, 1000])
def test_sqrt_takes_about_two_sqrt_n_slots(n):
    counts = validate(sqrt(n), n)
    assert counts.peak_slots.memory <= 2 * (isqrt(n) + 1)
    assert counts.forward_steps <= 3 * n


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_keep_all_runs_each_step_again_only_for_its_tape(n):
    counts = validate(keep_all(n), n, slots=n - 1)
    assert counts.forward_steps == 2 * n - 1


@given(st.integers(2, 300), st.integers(1, 300))
@settings(max_examples=80, deadline=None)
def test_revolve_takes_at_most_the_steps_of_periodic_with_equal_slots(n, period):
    simple = periodic(n, period)
    assert revolve(n, simple.peak_slots.memory).forward_steps <= simple.forward_steps
