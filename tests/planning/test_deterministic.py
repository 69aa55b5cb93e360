"""The same trace and budget give the same plan, also on a busy machine."""

import subprocess
import sys
from dataclasses import replace

import pytest

from lowtide.planning import Plan, Problem, simulate, solve

from .traces import gpt_trace, unet_trace


def without_solve_time(plan: Plan) -> Plan:
    """Return the plan without the time that planning took."""
    return replace(plan, solve_s=0.0)


@pytest.mark.parametrize(("trace", "share"), [(gpt_trace(8), 0.6), (unet_trace(4), 0.35)], ids=["gpt", "unet"])
def test_the_plan_does_not_depend_on_load(trace, share):
    budget = int(share * simulate(trace, Problem(trace).keep_all()).peak_bytes)
    quiet = solve(trace, budget)
    assert quiet.recomputed
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        busy = solve(trace, budget)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert without_solve_time(busy) == without_solve_time(quiet)
