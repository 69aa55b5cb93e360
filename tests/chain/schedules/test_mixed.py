"""`mixed`: the fewest forward steps if slots may hold states or tapes."""

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.chain.schedules import mixed, revolve, validate

from .exhaustive import least_cost

# Forward steps of MixedCheckpointSchedule in the package `checkpoint_schedules`.
REFERENCE = {
    (100, 5): 352, (100, 10): 237, (100, 50): 150,
    (1000, 5): 6828, (1000, 10): 3921, (1000, 50): 1974,
    (10000, 5): 119808, (10000, 10): 60960, (10000, 50): 28912,
}  # fmt: skip


@pytest.mark.parametrize(("n", "slots"), REFERENCE)
def test_at_most_the_steps_of_checkpoint_schedules(n, slots):
    schedule = mixed(n, slots)
    assert schedule.forward_steps <= REFERENCE[n, slots]
    assert validate(schedule, n, slots=slots).forward_steps == schedule.forward_steps


@pytest.mark.parametrize("n", range(1, 8))
def test_steps_match_exhaustive_search(n):
    for slots in range(1, 6):
        assert mixed(n, slots).forward_steps == least_cost(n, slots, tapes=True), (n, slots)


@given(st.integers(1, 300), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_valid_and_as_predicted(n, slots):
    schedule = mixed(n, slots)
    counts = validate(schedule, n, slots=slots)
    assert (counts.forward_steps, counts.peak_slots) == (schedule.forward_steps, schedule.peak_slots)
    assert n <= counts.forward_steps <= revolve(n, slots).forward_steps


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
def test_n_minus_one_slots_need_no_recomputation(n):
    assert mixed(n, max(n - 1, 1)).forward_steps == n
