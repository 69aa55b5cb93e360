"""The validator finds every kind of mistake, and says where it is."""

import pytest

from lowtide import ArgumentError, ScheduleError
from lowtide.chain.schedules import Advance, Free, Load, Reverse, Store, Tiers, validate

TWO_STEPS = [Store(0), Advance(0, 1), Reverse(1), Load(0), Free(0), Reverse(0)]


def test_counts_of_a_run_by_hand():
    actions = [
        Store(0, "disk"),
        Store(0, what="tape"),
        Store(1),
        Advance(1, 2),
        Reverse(2),
        Load(1),
        Free(1),
        Reverse(1),
        Reverse(0, source="tape"),
        Free(0, what="tape"),
        Load(0, "disk"),
        Free(0, "disk"),
    ]
    counts = validate(
        actions,
        3,
        memory_slots=2,
        disk_slots=1,
        sizes=[10, 20, 40, 80],
        tape_sizes=[3, 5, 7],
        work_sizes=[100, 1, 2],
        costs=[1.0, 10.0, 100.0],
        backward_costs=[0.5, 0.5, 0.5],
        write_cost=1000.0,
        read_cost=10_000.0,
    )
    assert counts.forward_steps == 4  # steps 0 and 1 once, 1 and 2 again under tape
    assert counts.peak_slots == Tiers(memory=2, disk=1)
    assert counts.reads == Tiers(memory=2, disk=1)
    assert counts.writes == Tiers(memory=2, disk=1)
    assert counts.peak_bytes == 103  # while step 0 is taped: its work space and its tape
    assert counts.cost == 1.0 + 20.0 + 100.0 + 1.5 + 1000.0 + 10_000.0


def test_without_costs_a_step_costs_one():
    assert validate(TWO_STEPS, 2, slots=1).cost == 3.0


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Advance(1, 2)], r"action 0, Advance\(start=1, stop=2\): needs x_1, but the working state is x_0"),
        ([Advance(0, 0)], "steps 0 to 0 are not a forward run within a chain of 2 steps"),
        ([Advance(0, 3)], "steps 0 to 3 are not a forward run within a chain of 2 steps"),
        ([Store(1)], "needs x_1, but the working state is x_0"),
        ([Store(0), Store(0)], "action 1, .*the state 0 is already stored in memory"),
        ([Store(0), Advance(0, 1), Store(1)], "action 2, .*all 1 memory slots are in use"),
        ([Store(0, "disk")], "all 0 disk slots are in use"),
        ([Store(0, "attic")], "there is no such tier or kind"),
        ([Advance(0, 2), Store(2, what="tape")], "a chain of 2 steps has no step 2 to tape"),
        ([Load(0)], "x_0 is not stored in memory; nothing is stored"),
        ([Store(0), Load(1)], r"x_1 is not stored in memory; stored are state 0 \(memory\)"),
        ([Store(0, what="tape"), Load(0, what="tape")], "a tape is not loaded: Reverse uses it where it is"),
        ([Free(0)], "the state 0 is not stored in memory"),
        ([Reverse(0)], "the next step to reverse is 1"),
        ([Reverse(1)], "needs x_1, but the working state is x_0"),
        ([Advance(0, 1), Reverse(1, source="tape")], "the tape of step 1 is not stored"),
        ([Advance(0, 1), Reverse(1, source="memory")], "from its 'state' or its 'tape', not from 'memory'"),
        ([Advance(0, 1), Reverse(1), Advance(1, 2)], "needs x_1, but there is no working state"),
        ([*TWO_STEPS, Reverse(0)], "action 6, .*every step has been reversed already"),
        (TWO_STEPS[:-1], "the schedule ends with the steps 0 to 0 of 2 not yet reversed"),
        ([*TWO_STEPS[:4], Reverse(0)], r"ends with slots still in use: state 0 \(memory\)"),
        (["Store"], "is no action of a schedule"),
    ],
)
def test_mistakes_are_named(actions, message):
    with pytest.raises(ScheduleError, match=message):
        validate(actions, 2, slots=1)


def test_a_budget_is_held_against_stored_tape_and_work_bytes():
    given = {"sizes": [8, 0, 0], "tape_sizes": [1, 4], "work_sizes": [2, 2]}
    assert validate(TWO_STEPS, 2, budget_bytes=14, **given).peak_bytes == 14  # x_0, tape 1 and work
    with pytest.raises(ScheduleError, match=r"action 2, .*14 bytes .* 1 more than the budget of 13"):
        validate(TWO_STEPS, 2, budget_bytes=13, **given)


def test_arguments_that_cannot_be_meant():
    with pytest.raises(ArgumentError, match="either slots, or memory_slots and disk_slots"):
        validate([], 1, slots=1, disk_slots=1)
    with pytest.raises(ArgumentError, match="at least one step, not 0"):
        validate([], 0)
