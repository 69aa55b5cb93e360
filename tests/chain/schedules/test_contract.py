"""The contract of all schedules: valid actions, and correct predictions before the run."""

import pytest

from lowtide import ArgumentError
from lowtide.chain import schedules
from lowtide.chain.schedules import (
    heterogeneous,
    keep_all,
    mixed,
    multistage,
    online,
    periodic,
    revolve,
    sqrt,
    validate,
)


def finished_online(slots, n):
    schedule = online(slots)
    for action in schedule.forward():
        if action == schedules.Advance(n - 1, n):
            schedule.finish()
    return schedule


COSTS, SIZES = [1.0, 4.0, 2.0, 3.0, 1.0, 2.0], [3, 1, 4, 1, 5, 9, 2]
SCHEDULES = {
    "revolve": (lambda: revolve(40, 4), {}),
    "one step": (lambda: revolve(1, 0), {}),
    "more slots than steps": (lambda: revolve(5, 100), {}),
    "mixed": (lambda: mixed(40, 4), {}),
    "multistage": (lambda: multistage(40, 2, 3, 1.5, 2.5), {"write_cost": 1.5, "read_cost": 2.5}),
    "multistage, all on disk": (lambda: multistage(20, 0, 3, 1, 1), {"write_cost": 1, "read_cost": 1}),
    "heterogeneous": (lambda: heterogeneous(COSTS, SIZES, 8), {"costs": COSTS, "sizes": SIZES}),
    "online": (lambda: finished_online(4, 40), {}),
    "periodic": (lambda: periodic(40, 7), {}),
    "sqrt": (lambda: sqrt(40), {}),
    "keep_all": (lambda: keep_all(40), {}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_predictions_match_the_validator(name):
    make, options = SCHEDULES[name]
    schedule = make()
    predicted = schedule.explain()
    counts = validate(schedule, schedule.n, **options)
    assert predicted.forward_steps == predicted.steps == schedule.forward_steps == counts.forward_steps
    assert predicted.peak_slots == schedule.peak_slots == counts.peak_slots
    assert predicted.peak_bytes == schedule.peak_bytes == counts.peak_bytes
    assert predicted.cost == schedule.cost
    assert schedule.cost is None or schedule.cost == pytest.approx(counts.cost)
    assert predicted.factor == counts.forward_steps / schedule.n
    assert predicted.n == schedule.n


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_iterations_give_the_same_actions(name):
    schedule = SCHEDULES[name][0]()
    first = iter(schedule)
    assert iter(schedule) is not first
    assert list(first) == list(schedule)


def test_text_of_explanation():
    assert str(keep_all(4).explain()) == (
        "keep_all: 4 steps reversed with 7 forward steps (1.75 × n), at most 3 slots in memory"
    )
    on_disk = str(multistage(3, 0, 1, write_cost=1, read_cost=1).explain())
    # One write, two reads of x_0, 2 + 1 plain steps and 3 taped steps.
    assert on_disk == (
        "multistage: 3 steps reversed with 6 forward steps (2.00 × n), at most 0 slots in memory and 1 on disk, cost 9"
    )
    held = str(heterogeneous([1, 1], [2048, 1, 1], "4 KiB").explain())
    assert held == (
        "heterogeneous: 2 steps reversed with 3 forward steps (1.50 × n), at most 1 slot in memory, "
        "at most 2.00 KiB held, cost 3"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: revolve(0, 3), "a chain has at least one step, not 0"),
        (lambda: revolve(5, 0), "reversing 5 steps needs at least one slot .*not 0"),
        (lambda: mixed(5, -1), "not -1"),
        (lambda: multistage(5, 0, 0, 1, 1), "needs at least one slot"),
        (lambda: multistage(5, -1, 3, 1, 1), "slots must not be negative, not -1"),
        (lambda: multistage(5, 1, 3, -1, 1), "neither may be negative"),
        (lambda: multistage(5, 1, 3, float("nan"), 1), "neither may be negative"),
        (lambda: periodic(5, 0), "a period is at least one step, not 0"),
        (lambda: periodic(0, 1), "at least one step"),
        (lambda: sqrt(0), "at least one step"),
        (lambda: keep_all(0), "at least one step"),
        (lambda: online(0), "a chain of unknown length needs at least one slot, not 0"),
        (lambda: online(1).replay(0), "at least one step, not 0"),
        (lambda: heterogeneous([], [1], 5), "costs is empty"),
        (lambda: heterogeneous([1], [1], 5), "1 steps have 2 states, x_0 to x_1, but 1 sizes were given"),
        (lambda: heterogeneous([1], [1, 1], 5, tape_sizes=[]), "tape_sizes has 0 entries for 1 steps"),
        (lambda: heterogeneous([-1], [1, 1], 5), "costs holds -1: values must not be negative"),
        (lambda: heterogeneous([1], [1, 1], 5, levels=1), "at least 2 levels, not 1"),
        (lambda: heterogeneous([1], [1, 1], 5.0), "a bare float"),
        (lambda: heterogeneous([1] * 9000, [1] * 9001, 5), "9000 steps are too many"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_public_names():
    assert sorted(schedules.__all__) == schedules.__all__
    assert all(hasattr(schedules, name) for name in schedules.__all__)
