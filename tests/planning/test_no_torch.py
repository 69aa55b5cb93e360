"""Planning does not import torch."""

import subprocess
import sys

CODE = """
import sys
from lowtide.records import Trace
from lowtide import planning
from lowtide._errors import BudgetError
from tests.planning.traces import gpt_trace

trace = Trace.from_json(gpt_trace(3).to_json())
plain = planning.simulate(trace, [True] * len(trace.ops)).peak_bytes
plan = planning.solve(trace, int(0.8 * plain), deadline_s=5)
str(plan), planning.Plan.from_json(plan.to_json())
try:
    planning.solve(trace, 1, deadline_s=1)
except BudgetError:
    pass
print([name for name in ("torch", "jax") if name in sys.modules])
"""


def test_planning_does_not_import_torch(request):
    ran = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, cwd=request.config.rootpath
    )
    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stderr
