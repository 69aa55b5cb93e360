"""rotor: its schedules are optimal on chains, and its plans fit."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace

import pytest
from benchmarks.planners.rotor import Block, DynamicProgram, solve_rotor
from hypothesis import given, settings, strategies as st

from lowtide.chain.schedules import revolve
from lowtide.planning import BASELINES, Problem, Simulator, simulate
from tests.planning.traces import changed, gpt_trace, unet_trace

KIB = 1 << 10


def exhaustive_time_s(blocks: list[Block], slots: int) -> float:
    """Return the smallest time of all persistent schedules, by exhaustive search.

    A state is the number of blocks left to reverse, the outputs that are held, and the blocks with all values held.
    """
    n = len(blocks)
    states = [(0.0, 0, n, frozenset(), frozenset())]
    seen = set()
    number = itertools.count(1)
    while states:
        time_s, _, left, outputs, kept = heapq.heappop(states)
        if not left:
            return time_s
        if (left, outputs, kept) in seen:
            continue
        seen.add((left, outputs, kept))
        memory_budget = slots - sum(blocks[i].output for i in outputs) - sum(blocks[i].kept for i in kept)

        def go(cost, *state):
            heapq.heappush(states, (time_s + cost, next(number), *state))

        last = left - 1
        if last in kept and memory_budget + blocks[last].kept >= blocks[last].peak:
            go(0.0, last, outputs - {last - 1}, kept - {last})
        for first in range(left):
            if first and first - 1 not in outputs | kept:
                continue
            block = blocks[first]
            if first not in kept and memory_budget >= block.peak:
                go(block.time_s, left, outputs, kept | {first})
            for cut in range(first + 1, left):
                passed = blocks[first:cut]
                if cut - 1 not in outputs and memory_budget >= max(one.forward_peak for one in passed):
                    go(sum(one.time_s for one in passed), left, outputs | {cut - 1}, kept)
    return math.inf


@st.composite
def chains(draw) -> list[Block]:
    sizes = st.integers(1, 4)
    blocks = []
    for _ in range(draw(st.integers(1, 5))):
        output, more = draw(sizes), draw(sizes)
        peak = output + more + draw(st.integers(0, 2))
        blocks.append(Block(float(draw(sizes)), output + more, output, draw(sizes), peak))
    return blocks


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(4, 24))
def test_no_persistent_schedule_is_faster(blocks, slots):
    assert DynamicProgram(blocks, slots).time_s(slots) == exhaustive_time_s(blocks, slots)


@pytest.mark.parametrize("slots", [2, 3, 5, 8])
def test_schedules_equal_revolve_if_only_one_block_can_be_kept(slots):
    kept = 50
    blocks = [Block(1.0, kept=kept, output=1, forward_peak=1, peak=kept) for _ in range(30)]
    program = DynamicProgram(blocks, kept + slots)
    assert program.time_s(kept + slots) == revolve(30, slots).forward_steps
    assert program.time_s(kept) == math.inf  # no slot for the input of the second block


@settings(max_examples=100, deadline=None)
@given(chains())
def test_more_memory_is_never_slower_and_ample_memory_runs_each_block_once(blocks):
    program = DynamicProgram(blocks, 60)
    times = [program.time_s(slots) for slots in range(61)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == sum(block.time_s for block in blocks)


def test_plans_fit_according_to_the_simulator():
    trace = gpt_trace(12)
    plain = simulate(trace, [True] * len(trace.ops))
    overheads_s = []
    for percent in (100, 80, 60, 40, 32):
        budget = plain.peak_bytes * percent // 100
        plan = solve_rotor(Simulator(Problem(trace)), budget)
        assert plan is not None
        simulation = simulate(trace, plan.keep, plan.released)
        assert simulation.peak_bytes == plan.peak_bytes <= budget
        assert simulation.extra_s == plan.extra_s
        overheads_s.append(plan.extra_s)
    assert overheads_s[0] == 0
    assert overheads_s == sorted(overheads_s)


def test_no_slower_than_checkpoints_at_the_same_peak():
    for layers in (6, 24):
        problem = Problem(gpt_trace(layers))
        every_block = Simulator(problem).run(BASELINES["every block"](problem))
        plan = solve_rotor(Simulator(problem), every_block.peak_bytes)
        assert plan is not None
        assert plan.extra_s <= every_block.extra_s + 1e-12
        assert not plan.released
        assert max(plan.simulation.replays) == 1


def test_outputs_are_replayed_below_the_peak_of_checkpoints():
    problem = Problem(gpt_trace(48))
    every_block = Simulator(problem).run(BASELINES["every block"](problem))
    plan = solve_rotor(Simulator(problem), every_block.peak_bytes * 85 // 100)
    assert plan is not None
    assert plan.released
    assert max(plan.simulation.replays) > 1
    assert plan.extra_s > every_block.extra_s


def test_module_names_are_not_needed():
    trace = gpt_trace(8)
    unnamed = changed(trace, ops=tuple(replace(op, module="") for op in trace.ops))
    budget = simulate(trace, [True] * len(trace.ops)).peak_bytes // 2
    plan = solve_rotor(Simulator(Problem(unnamed)), budget)
    assert plan is not None
    assert 0 < plan.extra_s < sum(op.time_s for op in trace.ops)


def test_no_plan_without_blocks_or_memory():
    unnamed = changed(unet_trace(), ops=tuple(replace(op, module="") for op in unet_trace().ops))
    assert solve_rotor(Simulator(Problem(unnamed)), 1 << 50) is None
    assert solve_rotor(Simulator(Problem(gpt_trace(8))), 64 * KIB) is None


def test_different_blocks_are_plan_by_module_names():
    simulator = Simulator(Problem(unet_trace()))
    plain = simulator.run(simulator.problem.keep_all())
    budget = int(0.7 * plain.peak_bytes)
    plan = solve_rotor(simulator, budget)
    assert plan is not None
    assert plan.peak_bytes <= budget
    assert 0 < plan.extra_s < simulator.problem.trace.step_s / 3  # less than one forward pass
