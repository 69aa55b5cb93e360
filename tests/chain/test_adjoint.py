"""`grad`: bit-equal to storing every state, within slots, tiers and bytes."""

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
def test_revolve_is_bit_equal_to_storing_all(n, slots):
    counted, backward = Counted(step), Counted(adjoint_step)
    lam, report = grad(counted, backward, X0, n, adjoint=lambda x: 2 * x, slots=slots, check_determinism=True)
    assert np.array_equal(lam, storing_all(n))
    assert backward.calls == list(reversed(range(n)))
    assert report.forward_steps == report.predicted_forward_steps == schedules.revolve(n, min(slots, n)).forward_steps
    # Each reversed step counts as a forward step without a call of `step`. The final state takes one call.
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
def test_schedules_are_bit_equal_to_storing_all(schedule):
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


def test_heterogeneous_schedule_with_states_of_unequal_size():
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


def test_steps_may_write_into_their_arguments():
    def in_place(x, i):
        x[:] = step(x, i)
        return x

    def adjoint_in_place(x, lam, i):
        lam *= np.cos(x) + 0.1 * np.cos(i)
        x[:] = np.nan
        return lam

    final = np.ones(50)
    x = X0.copy()
    for schedule in (schedules.revolve(25, 3), schedules.keep_all(25), schedules.multistage(25, 1, 2, 1, 1)):
        lam, _ = grad(in_place, adjoint_in_place, x, 25, adjoint=final, schedule=schedule)
        assert np.array_equal(lam, storing_all(25, final=lambda x: np.ones(50)))
    assert np.array_equal(x, X0)
    assert np.array_equal(final, np.ones(50))


@pytest.mark.parametrize("adjoint", [np.ones(50), np.ones_like])
def test_steps_may_reuse_their_output_buffer(adjoint):
    buffer = np.empty(50)

    def buffered(x, i):
        buffer[:] = step(x, i)
        return buffer

    def rerunning(x, lam, i):
        before = x.copy()
        buffered(x, i)
        assert np.array_equal(x, before), "the adjoint step must get a private copy of the state"
        return adjoint_step(x, lam, i)

    for schedule in (schedules.revolve(25, 3), schedules.keep_all(25), schedules.sqrt(25)):
        lam, _ = grad(buffered, rerunning, X0, 25, adjoint=adjoint, schedule=schedule, check_determinism=True)
        assert np.array_equal(lam, storing_all(25, final=np.ones_like))
    lam, _ = grad(buffered, rerunning, X0, None, stop=lambda x, i: i == 25, adjoint=adjoint, slots=3)
    assert np.array_equal(lam, storing_all(25, final=np.ones_like))


def test_nested_states_and_adjoints_of_different_structure():
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
def test_budget_is_used_and_not_exceeded(factor):
    x = np.linspace(0, 1, 20_000)
    budget = factor * x.nbytes
    x.sum()
    tracemalloc.start()
    _, report = grad(sine, in_place_product, x, 60, adjoint=np.ones(20_000), budget=budget, scratch=x.nbytes)
    measured = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.peak_bytes <= budget
    assert measured <= budget + 100_000  # Python objects
    assert report.peak_slots["memory"] == factor - 4  # working state, successor, adjoint, scratch
    assert report.peak_bytes > budget - x.nbytes


def sine(x, i):
    return np.sin(x)


def in_place_product(x, lam, i):
    lam *= np.cos(x)
    return lam


def test_error_for_small_budget_names_the_smallest_that_works():
    with pytest.raises(BudgetError) as caught:
        grad(step, adjoint_step, X0, 30, adjoint=np.ones(50), budget=1000)
    assert caught.value.smallest_bytes == 4 * X0.nbytes
    assert str(caught.value).startswith(
        "a budget of 1000 B is too small: the smallest that works is 1.56 KiB (1,600 bytes), which is 1.17 KiB for the "
        "working state, its successor and the adjoints (a state has 400 B, the adjoint 400 B)"
    )
    for adjoint in (np.ones(50), np.ones_like):
        with pytest.raises(BudgetError) as caught:
            grad(step, adjoint_step, X0, 30, adjoint=adjoint, budget=1000, check_determinism=True)
        smallest = caught.value.smallest_bytes
        _, report = grad(step, adjoint_step, X0, 30, adjoint=adjoint, budget=smallest, check_determinism=True)
        assert report.peak_bytes <= smallest
        with pytest.raises(BudgetError):
            grad(step, adjoint_step, X0, 30, adjoint=adjoint, budget=smallest - 1, check_determinism=True)


def test_state_that_outgrows_the_budget_raises():
    with pytest.raises(BudgetError, match="larger than the one measured at the initial state"):
        grad(lambda x, i: np.resize(x, 2 * x.size), lambda x, lam, i: lam[: x.size], X0, 10, adjoint=X0, budget=4000)


def test_store_sets_precision_tier_and_limits():
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
        assert len(store) == 0, "grad must remove its slots from the user's store"
    _, report = grad(
        step, adjoint_step, X0, 30, adjoint=np.ones(50), budget=2000, store=ActivationStore(precision="float16")
    )
    assert report.peak_slots["memory"] == 8  # 800 bytes free, 100 per slot


def test_slots_on_disk_do_not_count_towards_the_budget():
    lam, report = grad(
        step, adjoint_step, X0, 30, adjoint=np.ones(50), budget=3 * X0.nbytes, store=ActivationStore(tier="disk")
    )
    assert np.array_equal(lam, storing_all(30, final=np.ones_like))
    assert report.forward_steps == schedules.keep_all(30).forward_steps
    assert report.peak_bytes <= 3 * X0.nbytes


def test_mapping_of_stores_by_tier(tmp_path):
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
def test_unknown_length(n, slots):
    stop = Counted(lambda x, i: i == n)
    lam, report = grad(
        step, adjoint_step, X0, None, stop=stop, adjoint=lambda x: 2 * x, slots=slots, check_determinism=True
    )
    assert np.array_equal(lam, storing_all(n))
    assert stop.calls == list(range(1, n + 1))
    assert report.n == n
    assert report.forward_steps == report.predicted_forward_steps
    assert report.peak_slots.get("memory", 0) <= slots


def test_unknown_length_within_a_budget():
    lam, report = grad(
        step, adjoint_step, X0, None, stop=lambda x, i: i == 50, adjoint=np.ones(50), budget=8 * X0.nbytes
    )
    assert np.array_equal(lam, storing_all(50, final=np.ones_like))
    assert report.peak_bytes <= 8 * X0.nbytes
    assert report.peak_slots["memory"] <= 5


def test_online_schedule_can_be_reused():
    schedule = schedules.online(4)
    for n in (30, 12):
        lam, report = grad(
            step, adjoint_step, X0, None, stop=lambda x, i: i == n, adjoint=lambda x: 2 * x, schedule=schedule
        )
        assert np.array_equal(lam, storing_all(n))
        assert report.n == n
    with pytest.raises(ArgumentError, match="an online schedule is for chains of unknown length"):
        grad(step, adjoint_step, X0, 9, adjoint=X0, schedule=schedule)


def test_errors_in_stop_get_a_note():
    def stop(x, i):
        raise BoomError

    with pytest.raises(BoomError) as caught:
        grad(step, adjoint_step, X0, None, stop=stop, adjoint=X0, slots=2)
    assert caught.value.__notes__ == ["in stop(x_1, 1)"]


@settings(max_examples=80, deadline=None)
@given(n=st.integers(1, 40), data=st.data())
def test_random_schedules_and_lengths(n, data):
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
