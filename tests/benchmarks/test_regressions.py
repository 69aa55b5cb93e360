"""`python -m benchmarks compare`: planted regressions are found, noise is not reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.harness.records import Run
from benchmarks.harness.regressions import Comparison, compare

from .synthetic import TRUTH, made_up_run

ROOT = Path(__file__).parents[2]
PLACE = ("model1", "planned@60")


def worse(comparison: Comparison) -> set[tuple[str, str]]:
    return {(one.model, one.variant) for one in comparison.findings if one.regressed}


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.03])
def test_noise_alone_is_no_regression(noise: float) -> None:
    # 30 comparisons in each pair, with outliers of 30 % in one of twenty steps.
    alarms = sum(
        compare(made_up_run(seed, noise=noise), made_up_run(500 + seed, noise=noise)).regressed
        for seed in range(20, 60)
    )
    assert alarms <= 1


@pytest.mark.parametrize(("noise", "factor"), [(0.003, 1.04), (0.01, 1.10), (0.03, 1.35)])
def test_a_planted_slowdown_is_the_only_finding(noise: float, factor: float) -> None:
    comparison = [
        worse(compare(made_up_run(seed, noise=noise), made_up_run(500 + seed, noise=noise, slower={PLACE: factor})))
        for seed in range(20, 40)
    ]
    assert sum(PLACE in one for one in comparison) >= 18
    assert sum(bool(one - {PLACE}) for one in comparison) <= 1


def test_a_speedup_is_no_regression() -> None:
    comparison = compare(made_up_run(1), made_up_run(2, slower={PLACE: 0.8}))
    assert not comparison.regressed
    assert [(one.model, one.variant) for one in comparison.findings] == [PLACE]


def test_a_slowdown_of_the_machine_is_no_regression() -> None:
    new = made_up_run(2)
    for model in new.models.values():
        for one in model.variants.values():
            one.cpu_s = [3 * seconds for seconds in one.cpu_s]
            one.beside_cpu_s = [[3 * seconds for seconds in pair] for pair in one.beside_cpu_s]
    assert not compare(made_up_run(1), new).findings


def test_times_are_not_compared_with_few_rounds() -> None:
    comparison = compare(made_up_run(1, rounds=3), made_up_run(2, rounds=3, slower={PLACE: 3.0}))
    assert not comparison.findings
    assert "3 rounds are too few to compare times: at least 5 are needed" in comparison.notes


def test_larger_peaks_are_regressions() -> None:
    comparison = compare(made_up_run(1), made_up_run(1, larger={("model0", "rule:every1"): 1.03}))
    assert worse(comparison) == {("model0", "rule:every1")}
    assert not compare(made_up_run(1), made_up_run(1, larger={("model0", "rule:every1"): 1.005})).findings


def test_a_larger_smallest_budget_is_a_regression_but_not_a_larger_peak_within_a_budget() -> None:
    grown = {("model0", "planned@smallest"): 1.05, ("model0", "planned@45"): 1.05}
    assert worse(compare(made_up_run(1), made_up_run(1, larger=grown))) == {("model0", "planned@smallest")}


def test_over_budget_inexact_and_failing_are_regressions() -> None:
    new = made_up_run(1)
    variants = new.models["model2"].variants
    variants["planned@60"].peak_bytes = (variants["planned@60"].asked_bytes or 0) + 1
    variants["rule:every1"].exact = False
    variants["online@60"].error = "BudgetError: made up"
    comparison = compare(made_up_run(1), new)
    assert worse(comparison) == {("model2", name) for name in ("planned@60", "rule:every1", "online@60")}
    assert not compare(new, made_up_run(1)).regressed


def test_results_of_one_run_only_are_noted() -> None:
    old, new = made_up_run(1), made_up_run(1)
    del new.models["model0"]
    del old.models["model1"].variants["sac"]
    new.models["model2"].title = "Model 2, larger"
    notes = compare(old, new).notes
    assert notes == (
        "model0 is only in the old run",
        "model1 / sac is only in the new run",
        "model2 has another size: 'Model 2' and 'Model 2, larger'",
    )


def test_the_exit_code_and_the_page_show_regressions(tmp_path: Path) -> None:
    old, same, slow, broken = (tmp_path / name for name in ("old.json", "same.json", "slow.json", "broken.json"))
    made_up_run(1).save(old)
    made_up_run(1).save(same)
    made_up_run(1, slower={PLACE: 1.5}).save(slow)
    broken.write_text('{"format": "something else"}')

    def command(new: Path, *options: str) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, "-m", "benchmarks", "compare", str(old), str(new), *options]
        return subprocess.run(call, cwd=ROOT, capture_output=True, text=True)

    assert command(same).returncode == 0
    page = tmp_path / "pages" / "slow.md"
    slower = command(slow, "--output", str(page))
    assert slower.returncode == 1
    assert "model1 / planned@60" in slower.stdout
    assert "| worse | model1 | planned@60 |" in page.read_text()
    unreadable = command(broken)
    assert unreadable.returncode == 1
    assert "has no benchmark results of version 1" in unreadable.stderr


MAIN_TRUTH = {
    **TRUTH,
    "planned@half": ("lowtide planned", 1.10, 0.55),
    "planned@checkpoint": ("lowtide planned", 1.20, 0.45),
}


def test_the_main_plans_get_a_verdict_for_every_model() -> None:
    old = made_up_run(1, noise=0.0005, rounds=15, truth=MAIN_TRUTH)
    slower = {("model0", "planned@half"): 1.05, ("model1", "planned@checkpoint"): 0.9}
    new = made_up_run(2, noise=0.0005, rounds=15, truth=MAIN_TRUTH, slower=slower)
    new.models["model2"].variants["planned@half"].error = "RuntimeError: made up"
    comparison = compare(old, new)
    verdicts = {(one.model, one.variant): one.verdict for one in comparison.checks}
    assert verdicts == {
        ("model0", "planned@half"): "SLOWER",
        ("model0", "planned@checkpoint"): "not slower",
        ("model1", "planned@half"): "not slower",
        ("model1", "planned@checkpoint"): "faster",
        ("model2", "planned@half"): "not compared: not measured in the new run",
        ("model2", "planned@checkpoint"): "not slower",
    }
    assert comparison.summary.startswith("1 of 5 plans (planned@half, planned@checkpoint) are slower by more than 1 %")
    assert "beyond noise: model0 / planned@half. 1 are faster, 3 are not slower, 0 are undecided" in comparison.summary
    page = comparison.page(old, new)
    check = comparison.checks[0]
    assert check.change is not None
    overheads = [f"{100 * (ratio - 1):.1f} %" for ratio in (check.change.old, check.change.new)]
    assert f"| model0 | planned@half | 100.0 | 55.0 | {overheads[0]} | {overheads[1]} | +" in page


def test_large_noise_leaves_the_main_plans_undecided() -> None:
    runs = [made_up_run(seed, noise=0.05, truth=MAIN_TRUTH) for seed in (1, 2)]
    assert {one.verdict for one in compare(*runs).checks} == {"undecided"}
    few = [made_up_run(seed, rounds=3, truth=MAIN_TRUTH) for seed in (1, 2)]
    assert {one.verdict for one in compare(*few).checks} == {"not compared: fewer than 5 rounds"}


def test_results_of_version_1_with_other_settings_are_read(tmp_path: Path) -> None:
    """Results of an earlier harness have other settings and the texts of the set-up."""
    run = made_up_run(1, truth=MAIN_TRUTH)
    run.settings |= {"decided_on": ["model0"], "few": 5, "seconds": None, "set_up": {"plain": "An old text."}}
    run.save(tmp_path / "old.json")
    assert not compare(Run.load(tmp_path / "old.json"), made_up_run(1, truth=MAIN_TRUTH)).regressed
