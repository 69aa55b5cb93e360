"""Sample reports: a transformer under a plan, and the same with names that try to inject markup."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from lowtide.planning import BASELINES, Problem, Simulator, lower_bound, simulate, solve
from lowtide.records import Trace
from lowtide.reporting.frontier import Frontier, Point
from lowtide.reporting.report import Report
from tests.planning.traces import changed, gpt_trace

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
    """The same model with hostile names of modules, ops, reasons, schemes and notes."""
    trace = gpt_trace(2)
    ops = list(trace.ops)
    for j, op in enumerate(ops):
        name = HOSTILE[j % len(HOSTILE)]
        pinned = name if j % 9 == 0 else None
        ops[j] = replace(op, module=f"{op.module}.{name}", name=f"aten.{name}", pinned=pinned)
    return report_of(changed(trace, ops=tuple(ops), note=HOSTILE[3], device=HOSTILE[0]), names=HOSTILE)


def report_of(trace: Trace, names: tuple[str, ...] = tuple(BASELINES)) -> Report:
    simulator = Simulator(Problem(trace))
    plain = simulator.run([True] * len(trace.ops)).peak_bytes
    plan = solve(trace, int(0.85 * plain), deadline_s=5)
    points = []
    for share in (0.85, 0.9, 1.0):
        at_share = solve(trace, int(share * plain), deadline_s=2)
        points.append(
            Point(
                at_share.budget_bytes,
                at_share.predicted_peak_bytes,
                at_share.predicted_step_s,
                at_share.bound_step_s,
                at_share.solver,
            )
        )
    baselines = []
    for name, decide in zip(names, BASELINES.values(), strict=False):
        simulation = simulate(trace, decide(simulator.problem))
        bound = lower_bound(simulator.problem, simulation.peak_bytes).step_s
        baselines.append(Point(simulation.peak_bytes, simulation.peak_bytes, simulation.step_s, bound, name))
    frontier = Frontier(tuple(points), tuple(baselines), plain, trace.step_s)
    return Report.of(
        trace,
        plan,
        frontier,
        measured_peak_bytes=plan.predicted_peak_bytes - 4096,
        measured_step_s=1.1 * plan.predicted_step_s,
    )
