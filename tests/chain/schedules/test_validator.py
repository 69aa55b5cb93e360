"""The validator: counts of a valid schedule, and the error of every invalid action."""

import pytest

from lowtide import ArgumentError, ScheduleError
from lowtide.chain.schedules import Advance, Free, Load, Reverse, Store, Tiers, validate

TWO_STEPS = [Store(0), Advance(0, 1), Reverse(1), Load(0), Free(0), Reverse(0)]


def test_counts():
    actions = [
        Store(0, "disk"),
        Store(0, content="tape"),
        Store(1),
        Advance(1, 2),
        Reverse(2),
        Load(1),
        Free(1),
        Reverse(1),
        Reverse(0, source="tape"),
        Free(0, content="tape"),
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
    assert counts.forward_steps == 4  # step 0 taped, step 1 plain, steps 2 and 1 reversed from a state
    assert counts.peak_slots == Tiers(memory=2, disk=1)
    assert counts.reads == Tiers(memory=2, disk=1)
    assert counts.writes == Tiers(memory=2, disk=1)
    assert counts.peak_bytes == 103  # work space and tape while step 0 is taped
    assert counts.cost == 1.0 + 20.0 + 100.0 + 1.5 + 1000.0 + 10_000.0


def test_default_cost_of_a_step_is_one():
    assert validate(TWO_STEPS, 2, slots=1).cost == 3.0


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Advance(1, 2)], r"action 0, Advance\(start=1, stop=2\): needs x_1, but the working state is x_0"),
        ([Advance(0, 0)], "0 to 0 is not a range of forward steps in a chain of 2 steps"),
        ([Advance(0, 3)], "0 to 3 is not a range of forward steps in a chain of 2 steps"),
        ([Store(1)], "needs x_1, but the working state is x_0"),
        ([Store(0), Store(0)], "action 1, .*the state 0 is already stored in memory"),
        ([Store(0), Advance(0, 1), Store(1)], "action 2, .*all 1 memory slots are in use"),
        ([Store(0, "disk")], "all 0 disk slots are in use"),
        ([Store(0, "network")], "unknown tier 'network' or content 'state'"),
        ([Advance(0, 2), Store(2, content="tape")], "a chain of 2 steps has no step 2 to tape"),
        ([Load(0)], "x_0 is not stored in memory; nothing is stored"),
        ([Store(0), Load(1)], r"x_1 is not stored in memory; stored: state 0 \(memory\)"),
        (
            [Store(0, content="tape"), Load(0, content="tape")],
            "a tape cannot be loaded: Reverse reads it from its slot",
        ),
        ([Free(0)], "the state 0 is not stored in memory"),
        ([Reverse(0)], "the next step to reverse is 1"),
        ([Reverse(1)], "needs x_1, but the working state is x_0"),
        ([Advance(0, 1), Reverse(1, source="tape")], "the tape of step 1 is not stored"),
        ([Advance(0, 1), Reverse(1, source="memory")], "the source of Reverse is 'state' or 'tape', not 'memory'"),
        ([Advance(0, 1), Reverse(1), Advance(1, 2)], "needs x_1, but there is no working state"),
        ([*TWO_STEPS, Reverse(0)], "action 6, .*all steps are already reversed"),
        (TWO_STEPS[:-1], "the schedule ends before steps 0 to 0 of 2 are reversed"),
        ([*TWO_STEPS[:4], Reverse(0)], r"ends with slots still in use: state 0 \(memory\)"),
        (["Store"], "not an action of a schedule"),
    ],
)
def test_invalid_actions(actions, message):
    with pytest.raises(ScheduleError, match=message):
        validate(actions, 2, slots=1)


def test_budget_limits_stored_tape_and_work_bytes():
    sizes = {"sizes": [8, 0, 0], "tape_sizes": [1, 4], "work_sizes": [2, 2]}
    assert validate(TWO_STEPS, 2, budget_bytes=14, **sizes).peak_bytes == 14  # x_0, tape 1 and work
    with pytest.raises(ScheduleError, match=r"action 2, .*14 bytes .* 1 more than the budget of 13"):
        validate(TWO_STEPS, 2, budget_bytes=13, **sizes)


def test_invalid_arguments():
    with pytest.raises(ArgumentError, match="either slots, or memory_slots and disk_slots"):
        validate([], 1, slots=1, disk_slots=1)
    with pytest.raises(ArgumentError, match="at least one step, not 0"):
        validate([], 0)
