"""`heterogeneous`: minimal cost among persistent schedules, within the budget, exact smallest budget."""

import random

import pytest
from hypothesis import given, settings, strategies as st

from lowtide import BudgetError
from lowtide.chain.schedules import heterogeneous, revolve, validate

from .exhaustive import least_cost


def random_chain(rng, longest, largest=6):
    n = rng.randint(1, longest)
    chain = {
        "costs": [rng.randint(0, 6) for _ in range(n)],
        "sizes": [rng.randint(0, largest) for _ in range(n + 1)],
    }
    if rng.random() < 0.5:
        chain["tape_sizes"] = [rng.randint(0, largest + 2) for _ in range(n)]
    if rng.random() < 0.4:
        chain["work_sizes"] = [rng.randint(0, largest) for _ in range(n)]
    return chain


def checked(chain, budget, **options):
    schedule = heterogeneous(budget_bytes=budget, **chain, **options)
    counts = validate(schedule, schedule.n, budget_bytes=budget, **chain)
    assert counts.cost == pytest.approx(schedule.cost)
    assert counts.peak_bytes == schedule.peak_bytes <= budget
    assert (counts.forward_steps, counts.peak_slots) == (schedule.forward_steps, schedule.peak_slots)
    return schedule


def cheapest(chain, budget, **options):
    return least_cost(len(chain["costs"]), budget=budget, tapes="tape_sizes" in chain, **chain, **options)


@pytest.mark.parametrize("seed", range(4))
def test_cost_and_smallest_budget_match_exhaustive_search(seed):
    rng = random.Random(seed)
    found = 0
    for _ in range(120):
        chain, budget = random_chain(rng, 6), rng.randint(1, 20)
        best = cheapest(chain, budget, persistent=True)
        if best is None:
            with pytest.raises(BudgetError) as error:
                heterogeneous(budget_bytes=budget, **chain)
            smallest = error.value.smallest_bytes
            assert cheapest(chain, smallest, persistent=True) is not None
            assert cheapest(chain, smallest - 1, persistent=True) is None
        else:
            schedule = checked(chain, budget)
            assert schedule.exact
            assert schedule.cost == best, (chain, budget)
            found += 1
    assert found > 60


def test_schedules_that_are_not_persistent_are_rarely_cheaper():
    """In this sample, in at most one case in fifty."""
    rng = random.Random(99)
    cheaper = cases = 0
    while cases < 150:
        chain, budget = random_chain(rng, 6), rng.randint(5, 20)
        best = cheapest(chain, budget)
        try:
            cost = checked(chain, budget).cost
        except BudgetError:
            continue
        assert best <= cost
        cases += 1
        cheaper += best < cost
    assert cheaper <= 3


def test_random_chains_stay_within_their_budget():
    rng = random.Random(7)
    for _ in range(2000):
        chain = random_chain(rng, 12, largest=1000)
        levels = rng.choice([2, 5, 30, None])
        budget = rng.randint(1, 5000)
        try:
            checked(chain, budget, levels=levels)
        except BudgetError as error:
            smallest = error.smallest_bytes
        else:
            continue
        assert smallest > budget
        checked(chain, smallest, levels=levels)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 10**9))
@settings(max_examples=60, deadline=None)
def test_equal_steps_and_states_match_revolve(n, slots, size):
    unused_bytes = size - 1
    schedule = heterogeneous([1.0] * n, [size] * (n + 1), slots * size + unused_bytes)
    assert schedule.exact
    assert schedule.cost == schedule.forward_steps == revolve(n, slots).forward_steps


def test_finer_grid_does_not_cost_more():
    rng = random.Random(3)
    n = 40
    sizes = [rng.randint(1000, 100_000) for _ in range(n + 1)]
    chain = {"costs": [rng.random() for _ in range(n)], "sizes": sizes}
    costs = {levels: checked(chain, sum(sizes) // 6, levels=levels).cost for levels in (10, 100, 1000, 4000)}
    assert costs[4000] <= costs[10]
    assert costs[1000] <= 1.01 * costs[4000]


def test_more_memory_never_costs_more():
    rng = random.Random(8)
    for _ in range(10):
        chain = random_chain(rng, 12)
        costs = []
        for budget in range(1, 60):
            try:
                costs.append(checked(chain, budget).cost)
            except BudgetError:
                assert not costs
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] >= sum(chain["costs"])


def test_error_names_the_smallest_budget():
    message = r"these 3 steps fits into 9 bytes .*the smallest budget that works is 10 bytes"
    with pytest.raises(BudgetError, match=message) as error:
        heterogeneous([1, 1, 1], [10, 1, 1, 1], 9)
    assert (error.value.budget_bytes, error.value.smallest_bytes) == (9, 10)


def test_backward_costs_only_add_to_the_cost():
    plain = heterogeneous([1, 2, 3], [1, 1, 1, 1], 1)
    with_backward = heterogeneous([1, 2, 3], [1, 1, 1, 1], 1, backward_costs=[10, 20, 30])
    assert with_backward.cost == plain.cost + 60
    assert list(with_backward) == list(plain)


def test_budget_may_be_a_string():
    assert heterogeneous([1, 1], [1024, 1024, 1024], "1 KiB").budget_bytes == 1024
