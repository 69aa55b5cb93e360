"""Greedy and knapsack planning, and the comparison of planners."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.harness.rows import read_rows, rewrite_page, write_rows
from benchmarks.planners.__main__ import compare_planners
from benchmarks.planners.greedy import solve_greedy
from benchmarks.planners.knapsack import solve_knapsack
from benchmarks.planners.tables import PLANNERS, Row, page

from lowtide.planning import BASELINES, Problem, Simulator
from tests.planning.traces import gpt_trace, unet_trace


def test_greedy_fits_where_a_simple_scheme_fits():
    trace = gpt_trace(6)
    simulator = Simulator(Problem(trace))
    for name, rule in BASELINES.items():
        scheme = simulator.run(rule(simulator.problem))
        plan = solve_greedy(simulator, scheme.peak_bytes, deadline=time.monotonic() + 10)
        assert plan is not None, name
        assert plan.peak_bytes <= scheme.peak_bytes
        assert plan.extra_s <= scheme.extra_s + 1e-12


def test_knapsack_plans_fit_the_budget_and_are_faster_with_more_memory() -> None:
    simulator = Simulator(Problem(unet_trace()))
    plain_peak_bytes = simulator.run(simulator.problem.keep_all()).peak_bytes
    overheads_s = []
    for percent in (100, 80, 60):
        plan = solve_knapsack(simulator, plain_peak_bytes * percent // 100)
        assert plan is not None
        assert plan.peak_bytes <= plain_peak_bytes * percent // 100
        overheads_s.append(plan.extra_s)
    assert overheads_s[0] == 0
    assert overheads_s == sorted(overheads_s)
    assert solve_knapsack(simulator, 1) is None


def test_all_planners_are_compared_with_the_lower_bound() -> None:
    for row in compare_planners("gpt", "A GPT", gpt_trace(6), percents=(80, 30)):
        assert tuple(row.overheads) == tuple(row.planning_s) == PLANNERS
        solve_overhead = row.overheads["solve"]
        assert solve_overhead is not None
        assert all(overhead is None or overhead >= row.bound - 1e-9 for overhead in row.overheads.values())
        assert all(overhead is None or overhead >= solve_overhead - 0.005 for overhead in row.overheads.values())


MACHINE = {"processor": "made up", "threads": 1, "versions": {"python": "3"}, "date": "2000-01-01T00:00:00"}


def made_up_row(model: str, percent: int, greedy: float, knapsack: float | None) -> Row:
    overheads = {"greedy": greedy, "knapsack": knapsack, "rotor": None, "MILP": 0.05, "solve": 0.04}
    return Row(model, model, percent, 60, 100, 10, overheads, dict.fromkeys(PLANNERS, 1.0), 0.03)


def test_the_page_has_medians_by_budget_and_can_be_written_again(tmp_path: Path) -> None:
    rows = [made_up_row("a", 80, 0.1, 0.2), made_up_row("b", 80, 0.3, None), made_up_row("a", 60, 0.4, None)]
    file = tmp_path / "planners.json"
    write_rows(file, rows, MACHINE, page)
    text = file.with_suffix(".md").read_text()
    assert "| 80 % | 20.0 % | 20.0 % (1 of 2) | no plan | 5.0 % | 4.0 % | 3.0 % |" in text
    assert "| 60 % | 40.0 % | no plan | no plan | 5.0 % | 4.0 % | 3.0 % |" in text
    assert "| b | 80 % | 60.0 % | 30.0 % | no plan | no plan | 5.0 % | 4.0 % | 3.0 % | 10 |" in text
    assert read_rows(file, Row) == (rows, MACHINE)
    file.with_suffix(".md").unlink()
    rewrite_page(file, Row, page)
    assert file.with_suffix(".md").read_text() == text
