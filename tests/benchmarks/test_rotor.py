"""rotor's programme is optimal on chains, and what it becomes fits."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace

import pytest
from benchmarks.planners.rotor import Block, Programme, solve_rotor
from hypothesis import given, settings, strategies as st

from lowtide.chain.schedules import revolve
from lowtide.planning import BASELINES, Problem, Simulator, simulate
from tests.planning.traces import changed, gpt_trace, unet_trace

KIB = 1 << 10


def searched(blocks: list[Block], slots: int) -> float:
    """The least time of all persistent schedules, by trying them all: nothing that is held is let go unused.

    A state is how many blocks are left to reverse, which boundaries are held, and which blocks are held whole.
    """
    n = len(blocks)
    states = [(0.0, 0, n, frozenset(), frozenset())]
    seen = set()
    number = itertools.count(1)
    while states:
        time_s, _, left, stored, whole = heapq.heappop(states)
        if not left:
            return time_s
        if (left, stored, whole) in seen:
            continue
        seen.add((left, stored, whole))
        memory_budget = slots - sum(blocks[i].boundary for i in stored) - sum(blocks[i].kept for i in whole)

        def go(cost, *state):
            heapq.heappush(states, (time_s + cost, next(number), *state))

        last = left - 1
        if last in whole and memory_budget + blocks[last].kept >= blocks[last].peak:
            go(0.0, last, stored - {last - 1}, whole - {last})
        for first in range(left):
            if first and first - 1 not in stored | whole:
                continue
            block = blocks[first]
            if first not in whole and memory_budget >= block.peak:
                go(block.time_s, left, stored, whole | {first})
            for cut in range(first + 1, left):
                passed = blocks[first:cut]
                if cut - 1 not in stored and memory_budget >= max(one.passing for one in passed):
                    go(sum(one.time_s for one in passed), left, stored | {cut - 1}, whole)
    return math.inf


@st.composite
def chains(draw) -> list[Block]:
    sizes = st.integers(1, 4)
    found = []
    for _ in range(draw(st.integers(1, 5))):
        boundary, more = draw(sizes), draw(sizes)
        peak = boundary + more + draw(st.integers(0, 2))
        found.append(Block(float(draw(sizes)), boundary + more, boundary, draw(sizes), peak))
    return found


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(4, 24))
def test_no_persistent_schedule_is_quicker(blocks, slots):
    assert Programme(blocks, slots).time_s(slots) == searched(blocks, slots)


@pytest.mark.parametrize("slots", [2, 3, 5, 8])
def test_where_no_two_blocks_can_be_held_whole_it_is_revolve(slots):
    whole = 50
    blocks = [Block(1.0, kept=whole, boundary=1, passing=1, peak=whole) for _ in range(30)]
    programme = Programme(blocks, whole + slots)
    assert programme.time_s(whole + slots) == revolve(30, slots).forward_steps
    assert programme.time_s(whole) == math.inf  # nowhere to hold what enters the second block


@settings(max_examples=100, deadline=None)
@given(chains())
def test_more_memory_is_never_slower_and_ample_memory_runs_each_block_once(blocks):
    programme = Programme(blocks, 60)
    times = [programme.time_s(slots) for slots in range(61)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == sum(block.time_s for block in blocks)


def test_what_is_found_fits_and_is_judged_by_the_simulator():
    trace = gpt_trace(12)
    plain = simulate(trace, [True] * len(trace.ops))
    slower = []
    for percent in (100, 80, 60, 40, 32):
        budget = plain.peak_bytes * percent // 100
        found = solve_rotor(Simulator(Problem(trace)), budget)
        assert found is not None
        released = simulate(trace, found.keep, found.released)
        assert released.peak_bytes == found.peak_bytes <= budget
        assert released.extra_s == found.extra_s
        slower.append(found.extra_s)
    assert slower[0] == 0
    assert slower == sorted(slower)


def test_at_the_peak_of_a_checkpoint_on_every_block_it_is_no_slower():
    for layers in (6, 24):
        problem = Problem(gpt_trace(layers))
        each = Simulator(problem).run(BASELINES["every block"](problem))
        found = solve_rotor(Simulator(problem), each.peak_bytes)
        assert found is not None
        assert found.extra_s <= each.extra_s + 1e-12
        assert not found.released
        assert max(found.simulation.replays) == 1


def test_below_that_boundaries_are_made_again():
    problem = Problem(gpt_trace(48))
    each = Simulator(problem).run(BASELINES["every block"](problem))
    found = solve_rotor(Simulator(problem), each.peak_bytes * 85 // 100)
    assert found is not None
    assert found.released
    assert max(found.simulation.replays) > 1
    assert found.extra_s > each.extra_s


def test_names_of_modules_are_not_needed():
    trace = gpt_trace(8)
    nameless = changed(trace, ops=tuple(replace(op, module="") for op in trace.ops))
    budget = simulate(trace, [True] * len(trace.ops)).peak_bytes // 2
    found = solve_rotor(Simulator(Problem(nameless)), budget)
    assert found is not None
    assert 0 < found.extra_s < sum(op.time_s for op in trace.ops)


def test_there_is_none_without_blocks_or_memory():
    nameless = replace(unet_trace(), ops=tuple(replace(op, module="") for op in unet_trace().ops))
    assert solve_rotor(Simulator(Problem(nameless)), 1 << 50) is None
    assert solve_rotor(Simulator(Problem(gpt_trace(8))), 64 * KIB) is None


def test_blocks_of_which_no_two_are_alike_are_told_by_their_names():
    simulator = Simulator(Problem(unet_trace()))
    plain = simulator.run(simulator.problem.keep_all())
    budget = int(0.7 * plain.peak_bytes)
    found = solve_rotor(simulator, budget)
    assert found is not None
    assert found.peak_bytes <= budget
    assert 0 < found.extra_s < simulator.problem.trace.step_s / 3  # what all of forward takes
