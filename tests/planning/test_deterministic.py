"""The same trace and budget give the same plan: on a busy machine, and in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from lowtide.planning import Plan, Problem, simulate, solve
from lowtide.records import Trace

from .traces import gpt_trace, unet_trace

SOLVE = """
import sys
from lowtide.planning import solve
from lowtide.records import Trace

print(solve(Trace.from_json(sys.stdin.read()), int(sys.argv[1])).to_json())
"""


def without_solve_time(plan: Plan) -> Plan:
    """Return the plan without the time that planning took."""
    return replace(plan, solve_s=0.0)


def budget_of(trace: Trace, share: float) -> int:
    return int(share * simulate(trace, Problem(trace).keep_all()).peak_bytes)


@pytest.mark.parametrize(("trace", "share"), [(gpt_trace(8), 0.6), (unet_trace(4), 0.35)], ids=["gpt", "unet"])
def test_the_plan_does_not_depend_on_load(trace, share):
    budget = budget_of(trace, share)
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


def test_the_plan_does_not_depend_on_the_hash_seed_of_the_process():
    trace, share = unet_trace(4), 0.35
    plans = []
    for seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SOLVE, str(budget_of(trace, share))],
            input=trace.to_json(),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        plans.append(without_solve_time(Plan.from_json(done.stdout)))
    assert plans[0] == plans[1] == plans[2]
