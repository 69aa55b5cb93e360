"""`online`: valid for every length, and near the optimum for known lengths."""

import random
from functools import cache

import pytest
from hypothesis import given, settings, strategies as st

from lowtide import ScheduleError
from lowtide.chain.schedules import Advance, Free, Store, online, revolve, validate


def steps_at(slots, lengths):
    """Return the forward steps for each length, measured in one run."""
    lengths, last = set(lengths), max(lengths)
    schedule = online(slots)
    steps = {}
    for action in schedule.forward():
        if isinstance(action, Advance) and action.stop in lengths:
            schedule.finish()
            steps[action.stop] = schedule.forward_steps
            if action.stop == last:
                break
            schedule.n = None  # undo finish()
    return steps


def worst_factor(slots, lengths):
    return max(steps / revolve(n, slots).forward_steps for n, steps in steps_at(slots, lengths).items())


@pytest.mark.parametrize("slots", [5, 10, 50])
def test_at_most_one_and_a_half_times_the_optimum(slots):
    counts = validate(online(slots).replay(10_000), 10_000, slots=slots)
    assert counts.forward_steps <= 1.5 * revolve(10_000, slots).forward_steps


@pytest.mark.parametrize(("slots", "factor"), [(1, 1.02), (2, 1.10), (3, 1.10), (4, 1.06), (5, 1.06), (8, 1.06),
                                               (10, 1.06), (20, 1.06), (50, 1.06)])  # fmt: skip
def test_near_the_optimum_for_many_lengths(slots, factor):
    rng = random.Random(slots)
    lengths = {*range(100, 160), *(int(100 * 200 ** rng.random()) for _ in range(150)), 20_000}
    assert worst_factor(slots, lengths) <= factor


def test_one_slot_adds_only_the_forward_sweep():
    for n, steps in steps_at(1, range(1, 100)).items():
        assert steps == n + n * (n + 1) // 2


@cache
def least_after_a_full_sweep(length, slots):
    """Return the minimal steps to reverse after a sweep to the end that left optimal checkpoints.

    With the steps of the sweep, a lower bound for online schedules.
    """
    best = revolve(length, slots).forward_steps
    if slots > 1:
        for k in range(1, length):
            best = min(best, revolve(k, slots).forward_steps + least_after_a_full_sweep(length - k, slots - 1))
    return best


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 6, 10, 20])
def test_short_chains_are_near_the_lower_bound_of_online_schedules(slots):
    for n, steps in steps_at(slots, range(1, 120)).items():
        least = n + least_after_a_full_sweep(n, slots)
        assert least <= steps <= 1.12 * least, n


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 10])
def test_valid_for_all_short_lengths(slots):
    for n in range(1, 90):
        counts = validate(online(slots).replay(n), n, slots=slots)
        assert counts.forward_steps == steps_at(slots, [n])[n]


@given(st.integers(1, 2500), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_valid_and_as_predicted(n, slots):
    schedule = online(slots)
    for action in schedule.forward():
        if isinstance(action, Advance) and action.stop == n:
            assert schedule.finish() == n
    counts = validate(schedule, n, slots=slots)
    assert schedule.n == n
    assert counts.forward_steps == schedule.forward_steps
    assert counts.peak_slots == schedule.peak_slots


def test_slots_for_every_state_need_one_step_more_than_the_optimum():
    """The optimum is 2n − 1 steps. An online schedule notices the end one step late."""
    assert steps_at(50, range(1, 51)) == {n: 2 * n for n in range(1, 51)}


def test_forward_advances_one_step_at_a_time_and_stops_after_finish():
    schedule = online(3)
    actions = []
    for action in schedule.forward():
        actions.append(action)
        if action == Advance(9, 10):
            schedule.finish()
    advances = [action for action in actions if isinstance(action, Advance)]
    assert advances == [Advance(i, i + 1) for i in range(10)]
    assert actions[0] == Store(0)
    assert Free(0) not in actions
    assert actions[-1] == Advance(9, 10)
    assert list(schedule.replay(10)) == [*actions, *schedule.reverse()] == list(schedule)


def test_finish_right_after_a_store():
    schedule = online(4)
    done = []
    for action in schedule.forward():
        done.append(action)
        if isinstance(action, Store) and action.step == 2:
            assert schedule.finish() == 2
    assert validate([*done, *schedule.reverse()], 2, slots=4).forward_steps == schedule.forward_steps


def test_forward_starts_a_new_run():
    schedule = online(2)
    for length in (7, 3):
        for action in schedule.forward():
            if isinstance(action, Advance) and action.stop == length:
                schedule.finish()
        assert schedule.n == length


def test_length_is_unknown_before_finish():
    schedule = online(3)
    assert schedule.n is None
    assert schedule.peak_slots.memory == 3
    for call in (schedule.explain, lambda: schedule.forward_steps, lambda: list(schedule.reverse())):
        with pytest.raises(ScheduleError, match="length"):
            call()
    with pytest.raises(ScheduleError, match="before the first Advance"):
        schedule.finish()
