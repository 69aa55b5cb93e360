"""Errors of `grad`: exceptions in steps, invalid schedules, invalid arguments. No slot stays in a store."""

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
def test_exceptions_keep_their_type_and_get_a_note_and_slots_are_removed(kind, note, tmp_path):
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


def test_slots_are_removed_after_an_interrupt():
    store = ActivationStore()

    def interrupted(x, i):
        if i == 5:
            raise KeyboardInterrupt
        return x

    with pytest.raises(KeyboardInterrupt):
        grad(interrupted, adjoint_step, X0, 20, adjoint=X0, slots=2, store=store)
    assert len(store) == 0


def test_check_determinism():
    calls = itertools.count()

    def drifting(x, i):
        return step(x, i) + (1e-16 if i == 4 and next(calls) > 0 else 0) * np.arange(50)

    message = "step 4 of 20 returned a different x_5 when it was run again"
    with pytest.raises(ReplayMismatchError, match=message):
        grad(drifting, adjoint_step, X0, 20, adjoint=X0, slots=2, check_determinism=True)
    rng = random.Random(0)
    grad(lambda x, i: x + rng.random(), adjoint_step, X0, 20, adjoint=X0, slots=2)  # off by default
    with pytest.raises(ArgumentError, match="compares bits, but the store for memory rounds to int8"):
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
        ({}, "no limit on stored states: pass slots="),
        ({"slots": 2, "budget": "1 MiB"}, "slots=, budget= and schedule= exclude each other"),
        ({"slots": 0}, "slots is the number of states that may be stored, an int ≥ 1, not 0"),
        ({"slots": 2, "tape_step": tape_step}, "tape_step= and adjoint_tape= belong together"),
        ({"schedule": schedules.revolve(9, 2)}, "the schedule revolve is for n=9, but n=20 was passed"),
        ({"schedule": schedules.mixed(20, 3)}, "this schedule stores tapes: pass tape_step= and adjoint_tape="),
        ({"slots": 2, "stop": lambda x, i: True}, "n and stop= exclude each other"),
        ({"slots": 2, "store": ActivationStore(slots=9)}, r"the store for memory may evict \('oldest'\)"),
        ({"slots": 2, "store": {"tape": ActivationStore()}}, "store= has a tier 'tape'"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(ArgumentError, match=message):
        grad(step, adjoint_step, X0, 20, adjoint=X0, **options)


@pytest.mark.parametrize("n", [-1, 2.0, True])
def test_invalid_n(n):
    with pytest.raises(ArgumentError, match="n is the number of steps, an int ≥ 0"):
        grad(step, adjoint_step, X0, n, adjoint=X0, slots=1)


def test_unknown_n_needs_stop():
    with pytest.raises(ArgumentError, match="n=None needs stop="):
        grad(step, adjoint_step, X0, None, adjoint=X0, slots=1)


def test_chain_without_steps():
    lam, report = grad(step, adjoint_step, X0, 0, adjoint=lambda x: 3 * x, slots=1)
    assert np.array_equal(lam, 3 * X0)
    assert report.forward_steps == 0


class InvalidSchedule(schedules.Schedule):
    """A schedule of arbitrary actions for three steps."""

    name, forward_steps, peak_slots = "invalid", 0, schedules.Tiers(1, 0)

    def __init__(self, *actions):
        self.n, self.actions = 3, actions

    def __iter__(self):
        return iter(self.actions)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Advance(1, 2)], r"Advance\(start=1, stop=2\): the working state is x_0"),
        ([Load(2)], "loads the state of step 2, which is not stored in memory"),
        ([schedules.Free(2)], "frees the state of step 2, which is not stored in memory"),
        ([Advance(0, 2), Reverse(2), Reverse(1)], "there is no working state"),
        ([Store(0), Advance(0, 2), Reverse(2, "tape")], "the tape of step 2 is not stored"),
    ],
)
def test_invalid_schedules(actions, message):
    with pytest.raises(ScheduleError, match=message):
        grad(step, adjoint_step, X0, 3, adjoint=X0, schedule=InvalidSchedule(*actions))
