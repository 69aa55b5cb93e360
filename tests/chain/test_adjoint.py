"""`grad`: the adjoint of storing every state, within slots, tiers and bytes, whatever the steps do."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lowtide import ArgumentError, BudgetError
from lowtide.chain import ActivationStore, grad, schedules
from lowtide.chain.schedules import Reverse

from .problems import X0, BoomError, Counted, adjoint_step, adjoint_tape, step, storing_all, storing_final, tape_step


@pytest.mark.parametrize("slots", [1, 2, 5, 29, 100])
@pytest.mark.parametrize("n", [1, 2, 30])
def test_revolve_gives_the_adjoint_of_storing_all_bit_for_bit(n, slots):
    counted, backward = Counted(step), Counted(adjoint_step)
    lam, report = grad(counted, backward, X0, n, adjoint=lambda x: 2 * x, slots=slots, check_determinism=True)
    assert np.array_equal(lam, storing_all(n))
    assert backward.calls == list(reversed(range(n)))
    assert report.forward_steps == report.predicted_forward_steps == schedules.revolve(n, min(slots, n)).forward_steps
    # Each reversed step counts as one forward step, which is the adjoint's; the final state takes one call.
    assert len(counted.calls) == report.step_calls == report.forward_steps - n + 1
    assert report.peak_slots.get("memory", 0) <= min(slots, max(n - 1, 1))


SCHEDULES = [
    schedules.keep_all(20),
    schedules.sqrt(20),
    schedules.periodic(20, 6),
    schedules.mixed(20, 3),
    schedules.mixed(20, 30),
    schedules.multistage(20, 2, 3, 1.0, 1.0),
    schedules.multistage(20, 1, 2, 0.1, 0.1),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.forward_steps}")
def test_every_schedule(schedule):
    counted, taped = Counted(step), Counted(tape_step)
    lam, report = grad(
        counted, adjoint_step, X0, 20, adjoint=2 * storing_final(20), schedule=schedule, tape_step=taped,
        adjoint_tape=adjoint_tape, check_determinism=True,
    )  # fmt: skip
    assert np.array_equal(lam, storing_all(20))
    assert report.forward_steps == schedule.forward_steps
    from_state = sum(isinstance(a, Reverse) and a.source == "state" for a in schedule)
    assert len(counted.calls) + len(taped.calls) == schedule.forward_steps - from_state
    peak = schedule.peak_slots
    assert report.peak_slots == {tier: k for tier, k in (("memory", peak.memory), ("disk", peak.disk)) if k}
    assert report.peak_stored_bytes == {tier: k * X0.nbytes for tier, k in report.peak_slots.items()}


def test_heterogeneous_runs_on_states_of_unequal_size():
    sizes = [1, 8, 2, 9, 3, 10, 4]

    def resize(x, i):
        return np.resize(np.sin(x), sizes[i + 1])

    def resize_adjoint(x, lam, i):
        out = np.zeros(len(x))
        for k, value in enumerate(lam):
            out[k % len(x)] += value
        return np.cos(x) * out

    nbytes = [8 * size for size in sizes]
    x = np.array([0.3])
    full, _ = grad(resize, resize_adjoint, x, 6, adjoint=np.ones(4), schedule=schedules.keep_all(6))
    schedule = schedules.heterogeneous([1.0, 2.0, 1.0, 3.0, 1.0, 1.0], nbytes, 200)
    lam, report = grad(resize, resize_adjoint, x, 6, adjoint=np.ones(4), schedule=schedule)
    assert np.array_equal(lam, full)
    assert report.peak_stored_bytes["memory"] <= 200


def test_slots_with_tapes_use_the_mixed_schedule():
    lam, report = grad(
        step, adjoint_step, X0, 40, adjoint=lambda x: 2 * x, slots=4, tape_step=tape_step, adjoint_tape=adjoint_tape
    )
    assert np.array_equal(lam, storing_all(40))
    assert report.schedule == "mixed"
    assert report.forward_steps < schedules.revolve(40, 4).forward_steps


def test_steps_that_write_into_their_arguments_do_no_harm():
    def in_place(x, i):
        x[:] = step(x, i)
        return x

    def adjoint_in_place(x, lam, i):
        lam *= np.cos(x) + 0.1 * np.cos(i)
        x[:] = np.nan
        return lam

    given = np.ones(50)
    x = X0.copy()
    for schedule in (schedules.revolve(25, 3), schedules.keep_all(25), schedules.multistage(25, 1, 2, 1, 1)):
        lam, _ = grad(in_place, adjoint_in_place, x, 25, adjoint=given, schedule=schedule)
        assert np.array_equal(lam, storing_all(25, final=lambda x: np.ones(50)))
    assert np.array_equal(x, X0)
    assert np.array_equal(given, np.ones(50))


@pytest.mark.parametrize("adjoint", [np.ones(50), np.ones_like])
def test_steps_that_give_out_a_buffer_of_their_own_do_no_harm(adjoint):
    buffer = np.empty(50)

    def buffered(x, i):
        buffer[:] = step(x, i)
        return buffer

    def rerunning(x, lam, i):
        before = x.copy()
        buffered(x, i)
        assert np.array_equal(x, before), "the state of an adjoint step is its own"
        return adjoint_step(x, lam, i)

    for schedule in (schedules.revolve(25, 3), schedules.keep_all(25), schedules.sqrt(25)):
        lam, _ = grad(buffered, rerunning, X0, 25, adjoint=adjoint, schedule=schedule, check_determinism=True)
        assert np.array_equal(lam, storing_all(25, final=np.ones_like))
    lam, _ = grad(buffered, rerunning, X0, None, stop=lambda x, i: i == 25, adjoint=adjoint, slots=3)
    assert np.array_equal(lam, storing_all(25, final=np.ones_like))


def test_nested_states_and_adjoints_of_another_shape():
    def nested(state, i):
        return {"x": step(state["x"], i), "count": state["count"] + 1}

    def backward(state, adjoint, i):
        lam, total = adjoint
        assert state["count"] == i
        return adjoint_step(state["x"], lam, i), total + float(lam.sum())

    state = {"x": X0, "count": 0}
    (lam, total), _ = grad(nested, backward, state, 12, adjoint=lambda s: (2 * s["x"], 0.0), slots=2)
    assert np.array_equal(lam, storing_all(12))
    assert isinstance(total, float)


# Budgets


@pytest.mark.parametrize("factor", [5, 8, 20])
def test_a_budget_is_kept_and_used(factor):
    x = np.linspace(0, 1, 20_000)
    budget = factor * x.nbytes
    x.sum()
    tracemalloc.start()
    _, report = grad(sine, in_place_product, x, 60, adjoint=np.ones(20_000), budget=budget, scratch=x.nbytes)
    measured = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.peak_bytes <= budget
    assert measured <= budget + 100_000  # Python's own objects
    assert report.peak_slots["memory"] == factor - 4  # working state, successor, adjoint, scratch
    assert report.peak_bytes > budget - x.nbytes


def sine(x, i):
    return np.sin(x)


def in_place_product(x, lam, i):
    lam *= np.cos(x)
    return lam


def test_too_small_a_budget_says_the_smallest_and_that_one_works():
    with pytest.raises(BudgetError) as caught:
        grad(step, adjoint_step, X0, 30, adjoint=np.ones(50), budget=1000)
    assert caught.value.smallest_bytes == 4 * X0.nbytes
    assert str(caught.value).startswith(
        "a budget of 1000 B is too small: the smallest that works is 1.56 KiB (1,600 bytes), which is 1.17 KiB for the "
        "working state, its successor and the adjoints (a state has 400 B, the adjoint 400 B)"
    )
    for callable_too in (np.ones(50), np.ones_like):
        with pytest.raises(BudgetError) as caught:
            grad(step, adjoint_step, X0, 30, adjoint=callable_too, budget=1000, check_determinism=True)
        smallest = caught.value.smallest_bytes
        _, report = grad(step, adjoint_step, X0, 30, adjoint=callable_too, budget=smallest, check_determinism=True)
        assert report.peak_bytes <= smallest
        with pytest.raises(BudgetError):
            grad(step, adjoint_step, X0, 30, adjoint=callable_too, budget=smallest - 1, check_determinism=True)


def test_a_state_that_outgrows_the_budget_is_an_error_not_an_overrun():
    with pytest.raises(BudgetError, match="larger than the initial state let expect"):
        grad(lambda x, i: np.resize(x, 2 * x.size), lambda x, lam, i: lam[: x.size], X0, 10, adjoint=X0, budget=4000)


def test_a_store_decides_precision_tier_and_limits():
    exact = storing_all(30)
    for store, error in (
        (ActivationStore(tier="disk"), 0),
        (ActivationStore(precision="float16"), 1e-2),
        (ActivationStore(budget=3 * X0.nbytes, evict="error"), 0),
    ):
        options = {} if store.budget_bytes else {"slots": 3}
        lam, report = grad(step, adjoint_step, X0, 30, adjoint=lambda x: 2 * x, store=store, **options)
        assert np.abs(lam - exact).max() <= error * np.abs(exact).max()
        assert (np.abs(lam - exact).max() > 0) == (error > 0)
        assert report.peak_slots == {"memory": 3}
        assert len(store) == 0, "the store is the user's, and is given back as it was"
    _, report = grad(
        step, adjoint_step, X0, 30, adjoint=np.ones(50), budget=2000, store=ActivationStore(precision="float16")
    )
    assert report.peak_slots["memory"] == 8  # 800 bytes left, 100 a slot


def test_slots_on_disk_take_none_of_the_budget():
    lam, report = grad(
        step, adjoint_step, X0, 30, adjoint=np.ones(50), budget=3 * X0.nbytes, store=ActivationStore(tier="disk")
    )
    assert np.array_equal(lam, storing_all(30, final=np.ones_like))
    assert report.forward_steps == schedules.keep_all(30).forward_steps
    assert report.peak_bytes <= 3 * X0.nbytes


def test_a_mapping_gives_each_tier_its_store(tmp_path):
    stores = {"memory": ActivationStore(), "disk": ActivationStore(tier="disk", directory=tmp_path, precision="int8")}
    _, report = grad(
        step, adjoint_step, X0, 20, adjoint=X0, schedule=schedules.multistage(20, 1, 4, 0.1, 0.1), store=stores
    )
    assert (
        report.peak_slots["disk"] == stores["disk"].stats().peak_bytes / (50 + 4 * 1 + 4) or report.peak_slots["disk"]
    )
    assert stores["disk"].stats().stored > 0
    assert len(stores["disk"]) == len(stores["memory"]) == 0


# Unknown length


@pytest.mark.parametrize("slots", [1, 3, 10])
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_online(n, slots):
    asked = Counted(lambda x, i: i == n)
    lam, report = grad(
        step, adjoint_step, X0, None, stop=asked, adjoint=lambda x: 2 * x, slots=slots, check_determinism=True
    )
    assert np.array_equal(lam, storing_all(n))
    assert asked.calls == list(range(1, n + 1))
    assert report.n == n
    assert report.forward_steps == report.predicted_forward_steps
    assert report.peak_slots.get("memory", 0) <= slots


def test_online_within_a_budget():
    lam, report = grad(
        step, adjoint_step, X0, None, stop=lambda x, i: i == 50, adjoint=np.ones(50), budget=8 * X0.nbytes
    )
    assert np.array_equal(lam, storing_all(50, final=np.ones_like))
    assert report.peak_bytes <= 8 * X0.nbytes
    assert report.peak_slots["memory"] <= 5


def test_an_online_schedule_can_be_passed_and_used_again():
    schedule = schedules.online(4)
    for n in (30, 12):
        lam, report = grad(
            step, adjoint_step, X0, None, stop=lambda x, i: i == n, adjoint=lambda x: 2 * x, schedule=schedule
        )
        assert np.array_equal(lam, storing_all(n))
        assert report.n == n
    with pytest.raises(ArgumentError, match="an online schedule is for chains of unknown length"):
        grad(step, adjoint_step, X0, 9, adjoint=X0, schedule=schedule)


def test_errors_in_stop_are_noted():
    def stop(x, i):
        raise BoomError

    with pytest.raises(BoomError) as caught:
        grad(step, adjoint_step, X0, None, stop=stop, adjoint=X0, slots=2)
    assert caught.value.__notes__ == ["in stop(x_1, 1)"]


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 40), data=st.data())
def test_any_schedule_of_any_length(n, data):
    slots = data.draw(st.integers(1, 8))
    kind = data.draw(st.sampled_from(["revolve", "mixed", "multistage", "periodic", "online", "budget"]))
    options = {"tape_step": tape_step, "adjoint_tape": adjoint_tape} if kind == "mixed" else {}
    length = n
    if kind == "online":
        options |= {"stop": lambda x, i: i == n, "slots": slots}
        length = None
    elif kind == "budget":
        options["budget"] = (3 + slots) * X0.nbytes
    elif kind == "multistage":
        options["schedule"] = schedules.multistage(n, slots, data.draw(st.integers(0, 5)), 1.0, 0.5)
    elif kind == "periodic":
        options["schedule"] = schedules.periodic(n, slots)
    else:
        options["slots"] = slots
    adjoint = data.draw(st.sampled_from([np.ones(50), np.ones_like]))
    if kind == "budget" and callable(adjoint):
        options["budget"] += X0.nbytes
    lam, report = grad(step, adjoint_step, X0, length, adjoint=adjoint, check_determinism=kind != "budget", **options)
    assert np.array_equal(lam, storing_all(n, final=np.ones_like))
    assert report.forward_steps == report.predicted_forward_steps
    if kind == "budget":
        assert report.peak_bytes <= options["budget"]
