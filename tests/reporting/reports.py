"""Reports to look at: a transformer under a plan, and one whose names try to break out of everything."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from lowtide.planning import BASELINES, Problem, Simulator, lower_bound, simulate, solve
from lowtide.records import Trace
from lowtide.reporting.frontier import Frontier, Point
from lowtide.reporting.report import Report
from tests.planning.traces import gpt_trace

HOSTILE = (
    "<script>document.title='broken'</script>",
    '"><img src=x onerror="document.title=\'broken\'">',
    "' onmouseover='x",
    "</script><script>document.title='broken'</script>",
    "</style></svg></title><b>",
    "a&amp;b & \\u003c <!-- ]]> ",
    "\u2028$\\frac{1}{$ _[bold]",
)


@cache
def gpt_report() -> Report:
    """Three blocks, 85 % of the plain peak, with a frontier and measured numbers."""
    return report_of(gpt_trace(3))


@cache
def hostile_report() -> Report:
    """The same step with hostile names of modules, ops, reasons, schemes and notes."""
    trace = gpt_trace(2)
    ops = list(trace.ops)
    for j, op in enumerate(ops):
        name = HOSTILE[j % len(HOSTILE)]
        pinned = name if j % 9 == 0 else None
        ops[j] = replace(op, module=f"{op.module}.{name}", name=f"aten.{name}", pinned=pinned)
    return report_of(replace(trace, ops=tuple(ops), note=HOSTILE[3], device=HOSTILE[0]), names=HOSTILE)


def report_of(trace: Trace, names: tuple[str, ...] = tuple(BASELINES)) -> Report:
    simulator = Simulator(Problem(trace))
    plain = simulator.run([True] * len(trace.ops)).peak_bytes
    plan = solve(trace, int(0.85 * plain), deadline_s=5)
    points = []
    for share in (0.85, 0.9, 1.0):
        one = solve(trace, int(share * plain), deadline_s=2)
        points.append(
            Point(one.budget_bytes, one.predicted_peak_bytes, one.predicted_step_s, one.bound_step_s, one.solver)
        )
    baselines = []
    for name, decide in zip(names, BASELINES.values(), strict=False):
        judged = simulate(trace, decide(simulator.problem))
        bound = lower_bound(simulator.problem, judged.peak_bytes).step_s
        baselines.append(Point(judged.peak_bytes, judged.peak_bytes, judged.step_s, bound, name))
    frontier = Frontier(tuple(points), tuple(baselines), plain, trace.step_s)
    return Report.of(
        trace,
        plan,
        frontier,
        measured_peak_bytes=plan.predicted_peak_bytes - 4096,
        measured_step_s=1.1 * plan.predicted_step_s,
    )
