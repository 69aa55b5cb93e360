"""`grad` when something is wrong: the step, the schedule, or the call. Nothing is left behind."""

import itertools
import random

import numpy as np
import pytest

from lowtide import ArgumentError, ReplayMismatchError, ScheduleError
from lowtide.chain import ActivationStore, grad, schedules
from lowtide.chain.schedules import Advance, Load, Reverse, Store

from .problems import X0, BoomError, adjoint_step, step, tape_step


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("step", "in step 7 of 20, forward"),
        ("adjoint", "in step 7 of 20, adjoint"),
        ("final", "in the adjoint of the final state x_20"),
    ],
)
def test_errors_keep_their_type_name_the_step_and_leave_nothing(kind, note, tmp_path):
    store = ActivationStore(tier="disk", directory=tmp_path)
    store.put("mine", X0)

    def bad_step(x, i):
        if kind == "step" and i == 7:
            raise BoomError
        return step(x, i)

    def bad_adjoint(x, lam, i):
        if kind == "adjoint" and i == 7:
            raise BoomError
        return adjoint_step(x, lam, i)

    def final(x):
        if kind == "final":
            raise BoomError
        return 2 * x

    with pytest.raises(BoomError) as caught:
        grad(bad_step, bad_adjoint, X0, 20, adjoint=final, slots=3, store=store)
    assert caught.value.__notes__ == [note]
    assert store.keys() == ("mine",)
    assert list(tmp_path.iterdir()) == []


def test_interrupts_are_cleaned_up_too():
    store = ActivationStore()

    def interrupted(x, i):
        if i == 5:
            raise KeyboardInterrupt
        return x

    with pytest.raises(KeyboardInterrupt):
        grad(interrupted, adjoint_step, X0, 20, adjoint=X0, slots=2, store=store)
    assert len(store) == 0


def test_determinism_is_checked_on_request():
    calls = itertools.count()

    def drifting(x, i):
        return step(x, i) + (1e-16 if i == 4 and next(calls) > 0 else 0) * np.arange(50)

    message = "step 4 of 20 gave another x_5 when it was run again"
    with pytest.raises(ReplayMismatchError, match=message):
        grad(drifting, adjoint_step, X0, 20, adjoint=X0, slots=2, check_determinism=True)
    rng = random.Random(0)
    grad(lambda x, i: x + rng.random(), adjoint_step, X0, 20, adjoint=X0, slots=2)  # unseen unless asked for
    with pytest.raises(ArgumentError, match="compares bits, but this store rounds"):
        grad(
            step,
            adjoint_step,
            X0,
            9,
            adjoint=X0,
            slots=2,
            check_determinism=True,
            store=ActivationStore(precision="int8"),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"how much may be stored\? Pass slots="),
        ({"slots": 2, "budget": "1 MiB"}, "slots=, budget= and schedule= exclude each other"),
        ({"slots": 0}, "slots is how many states may be stored, an int ≥ 1, not 0"),
        ({"slots": 2, "tape_step": tape_step}, "tape_step= and adjoint_tape= belong together"),
        ({"schedule": schedules.revolve(9, 2)}, "the schedule revolve is for n=9, but n=20 was asked"),
        ({"schedule": schedules.mixed(20, 3)}, "this schedule stores tapes: pass tape_step= and adjoint_tape="),
        ({"slots": 2, "stop": lambda x, i: True}, "n and stop= exclude each other"),
        ({"slots": 2, "store": ActivationStore(slots=9)}, r"the store for memory may evict \('oldest'\)"),
        ({"slots": 2, "store": {"tape": ActivationStore()}}, "store= has a tier 'tape'"),
    ],
)
def test_calls_that_cannot_be_meant(options, message):
    with pytest.raises(ArgumentError, match=message):
        grad(step, adjoint_step, X0, 20, adjoint=X0, **options)


@pytest.mark.parametrize("n", [-1, 2.0, True])
def test_n_must_be_a_count(n):
    with pytest.raises(ArgumentError, match="n is the number of steps, an int ≥ 0"):
        grad(step, adjoint_step, X0, n, adjoint=X0, slots=1)


def test_n_without_end_needs_stop():
    with pytest.raises(ArgumentError, match="n=None needs stop="):
        grad(step, adjoint_step, X0, None, adjoint=X0, slots=1)


def test_no_steps_at_all():
    lam, report = grad(step, adjoint_step, X0, 0, adjoint=lambda x: 3 * x, slots=1)
    assert np.array_equal(lam, 3 * X0)
    assert report.forward_steps == 0


class Wrong(schedules.Schedule):
    """A schedule that breaks its promises."""

    name, forward_steps, peak_slots = "wrong", 0, schedules.Tiers(1, 0)

    def __init__(self, *actions):
        self.n, self.actions = 3, actions

    def __iter__(self):
        return iter(self.actions)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Advance(1, 2)], r"Advance\(start=1, stop=2\): the working state is x_0"),
        ([Load(2)], "the state of step 2 is wanted, but it is not stored in memory"),
        ([schedules.Free(2)], "the state of step 2 is to be freed, but is not stored"),
        ([Advance(0, 2), Reverse(2), Reverse(1)], "there is no working state"),
        ([Store(0), Advance(0, 2), Reverse(2, "tape")], "the tape of step 2 is not stored"),
    ],
)
def test_invalid_schedules_are_stopped(actions, message):
    with pytest.raises(ScheduleError, match=message):
        grad(step, adjoint_step, X0, 3, adjoint=X0, schedule=Wrong(*actions))
