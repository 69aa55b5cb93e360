"""The greedy baseline."""

import time

from benchmarks.planners.greedy import solve_greedy

from lowtide.planning import BASELINES, Problem, Simulator
from tests.planning.traces import gpt_trace


def test_greedy_fits_wherever_a_simple_scheme_does():
    trace = gpt_trace(6)
    simulator = Simulator(Problem(trace))
    for name, rule in BASELINES.items():
        known = simulator.run(rule(simulator.problem))
        found = solve_greedy(simulator, known.peak_bytes, deadline=time.monotonic() + 10)
        assert found is not None, name
        assert found.peak_bytes <= known.peak_bytes
        assert found.extra_s <= known.extra_s + 1e-12
