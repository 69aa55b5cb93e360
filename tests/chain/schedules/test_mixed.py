"""`mixed` takes as few steps as any schedule whose slots hold states or tapes."""

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.chain.schedules import mixed, revolve, validate

from .exhaustive import least_cost

# What `checkpoint_schedules` reaches with its MixedCheckpointSchedule.
PEER = {
    (100, 5): 352, (100, 10): 237, (100, 50): 150,
    (1000, 5): 6828, (1000, 10): 3921, (1000, 50): 1974,
    (10000, 5): 119808, (10000, 10): 60960, (10000, 50): 28912,
}  # fmt: skip


@pytest.mark.parametrize(("n", "slots"), PEER)
def test_at_or_below_the_counts_of_the_literature(n, slots):
    schedule = mixed(n, slots)
    assert schedule.forward_steps <= PEER[n, slots]
    assert validate(schedule, n, slots=slots).forward_steps == schedule.forward_steps


@pytest.mark.parametrize("n", range(1, 8))
def test_no_schedule_at_all_takes_fewer_steps(n):
    for slots in range(1, 6):
        assert mixed(n, slots).forward_steps == least_cost(n, slots, tapes=True), (n, slots)


@given(st.integers(1, 300), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_valid_within_its_slots_and_as_promised(n, slots):
    schedule = mixed(n, slots)
    counts = validate(schedule, n, slots=slots)
    assert (counts.forward_steps, counts.peak_slots) == (schedule.forward_steps, schedule.peak_slots)
    assert n <= counts.forward_steps <= revolve(n, slots).forward_steps


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
def test_with_a_slot_for_every_step_but_one_nothing_is_run_again(n):
    assert mixed(n, max(n - 1, 1)).forward_steps == n
