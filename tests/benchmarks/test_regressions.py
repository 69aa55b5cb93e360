"""`python -m benchmarks compare`: planted regressions are found, noise is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.harness.regressions import Comparison, compare

from .synthetic import made_up_run

ROOT = Path(__file__).parents[2]
PLACE = ("model1", "planned@60")


def worse(found: Comparison) -> set[tuple[str, str]]:
    return {(one.model, one.variant) for one in found.findings if one.regressed}


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.03])
def test_noise_alone_is_no_regression(noise: float) -> None:
    # 30 comparisons in each pair, with blips of 30 % in one step of twenty.
    alarms = sum(
        compare(made_up_run(seed, noise=noise), made_up_run(500 + seed, noise=noise)).regressed
        for seed in range(20, 60)
    )
    assert alarms <= 1


@pytest.mark.parametrize(("noise", "factor"), [(0.003, 1.04), (0.01, 1.10), (0.03, 1.35)])
def test_a_planted_slowdown_is_found_and_nothing_else(noise: float, factor: float) -> None:
    found = [
        worse(compare(made_up_run(seed, noise=noise), made_up_run(500 + seed, noise=noise, slower={PLACE: factor})))
        for seed in range(20, 40)
    ]
    assert sum(PLACE in one for one in found) >= 18
    assert sum(bool(one - {PLACE}) for one in found) <= 1


def test_what_became_faster_is_no_regression() -> None:
    found = compare(made_up_run(1), made_up_run(2, slower={PLACE: 0.8}))
    assert not found.regressed
    assert [(one.model, one.variant) for one in found.findings] == [PLACE]


def test_a_slowdown_of_the_whole_machine_is_none() -> None:
    new = made_up_run(2)
    for model in new.models.values():
        for one in model.variants.values():
            one.cpu_s = [3 * seconds for seconds in one.cpu_s]
            one.beside_cpu_s = [[3 * seconds for seconds in pair] for pair in one.beside_cpu_s]
    assert not compare(made_up_run(1), new).findings


def test_few_rounds_judge_no_times() -> None:
    found = compare(made_up_run(1, rounds=3), made_up_run(2, rounds=3, slower={PLACE: 3.0}))
    assert not found.findings
    assert "3 rounds are too few to compare times: at least 5 are needed" in found.notes


def test_larger_peaks_are_found() -> None:
    found = compare(made_up_run(1), made_up_run(1, larger={("model0", "rule:every1"): 1.03}))
    assert worse(found) == {("model0", "rule:every1")}
    assert not compare(made_up_run(1), made_up_run(1, larger={("model0", "rule:every1"): 1.005})).findings


def test_a_larger_smallest_budget_is_found_but_not_a_fuller_one() -> None:
    grown = {("model0", "planned@smallest"): 1.05, ("model0", "planned@45"): 1.05}
    assert worse(compare(made_up_run(1), made_up_run(1, larger=grown))) == {("model0", "planned@smallest")}


def test_over_budget_inexact_and_failing_are_regressions() -> None:
    new = made_up_run(1)
    variants = new.models["model2"].variants
    variants["planned@60"].peak_bytes = (variants["planned@60"].asked_bytes or 0) + 1
    variants["rule:every1"].exact = False
    variants["online@60"].error = "BudgetError: made up"
    found = compare(made_up_run(1), new)
    assert worse(found) == {("model2", name) for name in ("planned@60", "rule:every1", "online@60")}
    assert not compare(new, made_up_run(1)).regressed


def test_what_cannot_be_compared_is_said() -> None:
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


def test_the_command_says_by_its_exit_code(tmp_path: Path) -> None:
    old, same, slow, broken = (tmp_path / name for name in ("old.json", "same.json", "slow.json", "broken.json"))
    made_up_run(1).save(old)
    made_up_run(1).save(same)
    made_up_run(1, slower={PLACE: 1.5}).save(slow)
    broken.write_text('{"format": "something else"}')

    def command(new: Path) -> subprocess.CompletedProcess[str]:
        call = [sys.executable, "-m", "benchmarks", "compare", str(old), str(new)]
        return subprocess.run(call, cwd=ROOT, capture_output=True, text=True)

    assert command(same).returncode == 0
    worse_one = command(slow)
    assert worse_one.returncode == 1
    assert "model1 / planned@60" in worse_one.stdout
    unreadable = command(broken)
    assert unreadable.returncode == 1
    assert "holds no benchmark results of version 1" in unreadable.stderr
