"""Verdicts, the summary and the results page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.harness.pages import read_why, write_page
from benchmarks.harness.records import ModelResult, ResultsError, Run
from benchmarks.harness.rows import write_rows
from benchmarks.harness.summary import summary
from benchmarks.harness.verdicts import at_equal_overhead, at_equal_peak, distance_to_bound, where_behind
from benchmarks.planners.tables import PLANNERS, Row, page as planners_page

from .synthetic import MACHINE, TRUTH, made_up_run


def model_of(run: Run) -> ModelResult:
    return run.models["model0"]


def test_equal_peak_takes_the_fastest_plan_with_no_more_memory() -> None:
    model = model_of(made_up_run(1))
    at = {peer: at_equal_peak(model, peer) for peer in ("checkpoint", "sac", "offload", "compile")}
    assert (at["checkpoint"].ours, at["checkpoint"].outcome) == ("planned@45", "ahead")
    assert (at["sac"].ours, at["sac"].outcome) == ("planned@60", "ahead")
    assert at["offload"].ours == "planned@80"
    assert (at["compile"].ours, at["compile"].outcome) == ("planned@45", "behind")


def test_plans_are_not_interpolated() -> None:
    truth = {**TRUTH, "sac": ("torch SAC", 1.15, 0.59)}  # slightly below the plan at 60 %
    assert at_equal_peak(model_of(made_up_run(1, truth=truth)), "sac").ours == "planned@45"


def test_a_peak_below_all_plans_is_out_of_reach() -> None:
    truth = {**TRUTH, "checkpoint": ("torch checkpoint", 1.30, 0.2)}
    model = model_of(made_up_run(1, truth=truth))
    assert at_equal_peak(model, "checkpoint").outcome == "out of reach"
    assert [one.variant for one in where_behind("model0", model)] == ["checkpoint", "compile"]


def test_equal_times_are_undecided_in_both_tables() -> None:
    truth = {**TRUTH, "checkpoint": ("torch checkpoint", 1.12, 0.5)}
    for seed in range(20):
        model = model_of(made_up_run(seed, truth=truth))
        assert at_equal_peak(model, "checkpoint").outcome == "undecided"
        # By chance the plan at 45 % may be measured slower; the next one needs more memory.
        assert at_equal_overhead(model, "checkpoint").outcome in ("undecided", "behind")


def test_few_rounds_decide_nothing() -> None:
    model = model_of(made_up_run(1, rounds=2))
    assert at_equal_peak(model, "checkpoint").outcome == "undecided"
    assert at_equal_overhead(model, "checkpoint").outcome == "undecided"


def test_equal_overhead_takes_the_smallest_plan_that_is_no_slower() -> None:
    model = model_of(made_up_run(1, noise=0.003))  # SAC and the plan of 45 % are 3 % apart
    assert (at_equal_overhead(model, "checkpoint").ours, at_equal_overhead(model, "checkpoint").outcome) == (
        "planned@45",
        "undecided",  # faster, with the same peak
    )
    assert (at_equal_overhead(model, "sac").ours, at_equal_overhead(model, "sac").outcome) == ("planned@45", "ahead")
    assert at_equal_overhead(model, "compile").outcome == "out of reach"


def test_faults_of_lowtide_are_listed() -> None:
    model = model_of(made_up_run(1))
    model.variants["planned@45"].exact = False
    model.variants["online@60"].error = "BudgetError: a budget cannot be met. What helps: more."
    model.variants["planned@80"].own_peak_bytes = (model.variants["planned@80"].asked_bytes or 0) + 1
    faults = {one.variant: one.sentence for one in where_behind("model0", model) if one.variant != "compile"}
    assert faults == {
        "planned@45": "loss or gradients differ from plain's",
        "online@60": "BudgetError: a budget cannot be met.",
        "planned@80": "the peak is over the budget",
    }


def test_the_page_has_reasons_for_results_in_which_lowtide_is_behind(tmp_path: Path) -> None:
    why = tmp_path / "why.md"
    why.write_text("# Why\n\n## */compile\n\nFused kernels\nsave memory traffic.\n\n## model1/compile\n\nHere too.\n")
    assert read_why(why) == {"*/compile": "Fused kernels save memory traffic.", "model1/compile": "Here too."}
    assert read_why(tmp_path / "missing.md") == {}
    write_page(made_up_run(1), tmp_path / "RESULTS.md", tmp_path / "plots", why)
    lines = (tmp_path / "RESULTS.md").read_text().splitlines()
    behind = {line.split("**")[1]: line for line in lines if line.startswith("- **")}
    assert "*Why: Fused kernels save memory traffic.*" in behind["model0 / compile"]
    assert behind["model1 / compile"].endswith("*Why: Fused kernels save memory traffic.* *Why: Here too.*")
    for name in ("model0", "model1", "model2"):
        assert f"(plots/{name}.png)" in "\n".join(lines)
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_reading_results_needs_no_torch() -> None:
    code = "import sys, benchmarks.harness.pages, benchmarks.harness.regressions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_results_are_equal_after_save_and_load(tmp_path: Path) -> None:
    run = made_up_run(1)
    run.save(tmp_path / "results.json")
    assert Run.load(tmp_path / "results.json") == run
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    with pytest.raises(ResultsError, match="cannot read results from"):
        Run.load(tmp_path / "nothing.json")


def test_the_distance_to_the_lower_bound() -> None:
    model = model_of(made_up_run(1, noise=0.001))
    assert distance_to_bound(model, "planned@45") is None
    one = model.variants["planned@45"]
    one.predicted_plain_s, one.predicted_extra_s, one.bound_extra_s = 2.0, 0.2, 0.16
    distance = distance_to_bound(model, "planned@45")
    assert distance is not None
    assert distance.predicted == pytest.approx(0.02)
    assert distance.measured == pytest.approx(model.ratio("planned@45") - 1.08)


def test_the_summary_has_five_lines_and_counts_every_comparison() -> None:
    run = made_up_run(1, noise=0.003)
    run.models["model1"].variants["planned@80"].exact = False
    run.models["model2"].variants["planned@60"].own_peak_bytes = 2**40
    one = run.models["model0"].variants["planned@45"]
    one.predicted_plain_s, one.predicted_extra_s, one.bound_extra_s = 2.0, 0.2, 0.16
    checkpoint, sac, others, bound, plain = summary(run.models)
    assert checkpoint.endswith(": ahead on 3 of 3.")
    assert "at the peak of selective" in sac.lower()
    assert others.endswith("compile: behind on 3 of 3.")
    assert bound.startswith("1 plans between")
    assert "2.0 percentage points above the lower bound as predicted (median; at most 2.0)" in bound
    assert plain.endswith("14 of 15 budgets were held; 17 of 18 variants are bit-equal.")


def test_the_summary_of_a_run_without_peers_and_plans() -> None:
    lines = summary(made_up_run(1, truth={"plain": TRUTH["plain"]}).models)
    assert len(lines) == 5
    assert all("not measured" in line for line in lines)


def test_the_page_has_distances_noise_and_set_up(tmp_path: Path) -> None:
    truth = {**TRUTH, "plain-again": ("plain", 1.0, 1.0), "planned@half": ("lowtide planned", 1.02, 0.55)}
    run = made_up_run(1, truth=truth, noise=0.001, models=1)
    one = run.models["model0"].variants["planned@half"]
    one.predicted_plain_s, one.predicted_extra_s, one.bound_extra_s = 2.0, 0.06, 0.02
    run.models["model0"].variants["planned@smallest"].error = "BudgetError: too small. Ask for more."
    write_page(run, tmp_path / "RESULTS.md", tmp_path, tmp_path / "why.md")
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.splitlines()[2:7] == [f"- {line}" for line in summary(run.models)]
    assert f"(`plain-again`): model0 × {run.models['model0'].ratio('plain-again'):.3f}." in page
    assert "- **checkpoint**: `torch.utils.checkpoint` on every block" in page
    assert "- **planned**: `plan = lowtide.plan(model, batch, budget)`" in page
    overhead = run.models["model0"].ratio("planned@half") - 1
    cells = f"{100 * overhead:.1f} % | 3.0 % | 1.0 % | +2.0 pp | {100 * (overhead - 0.01):+.1f} pp |"
    assert f"| model0 | planned@half | 55.0 % | {cells}" in page
    assert "| model0 | planned@smallest |  |  |  |  |  | BudgetError: too small. |" in page
    assert "; 9 rounds" in page


def test_results_without_neighbouring_plain_steps_use_those_of_the_round(tmp_path: Path) -> None:
    run = made_up_run(1)
    for one in run.models["model0"].variants.values():
        one.beside_cpu_s.clear()
        one.beside_wall_s.clear()
    model = run.models["model0"]
    plain = model.plain.cpu_s
    assert model.ratios("sac") == [a / b for a, b in zip(model.variants["sac"].cpu_s, plain, strict=True)]
    assert model.ratio_of_minima("sac") == min(model.variants["sac"].cpu_s) / min(plain)


def test_the_page_of_the_standard_models_has_the_planners_if_they_were_compared(tmp_path: Path) -> None:
    run, page, plots = made_up_run(1, models=1), tmp_path / "RESULTS.md", tmp_path / "results" / "peers"
    heading = "## Greedy and knapsack beside MILP on the same traces"
    overheads = dict.fromkeys(PLANNERS, 0.05)
    row = Row("gpt2", "GPT-2", 60, 60, 100, 10, overheads, dict.fromkeys(PLANNERS, 1.0), bound=0.03)
    write_rows(tmp_path / "results" / "planners.json", [row], MACHINE, planners_page)
    write_page(run, page, plots)
    assert heading not in page.read_text()
    run.settings["catalogue"] = "standard"
    write_page(run, page, plots)
    assert heading in page.read_text()
    assert "| 60 % | 5.0 % | 5.0 % | 5.0 % | 5.0 % | 5.0 % | 3.0 % |" in page.read_text()
    assert "](results/planners.md)" in page.read_text()
