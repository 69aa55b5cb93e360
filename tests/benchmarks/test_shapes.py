"""Training with variable shapes: the workloads, a tiny run, and its page."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.harness.rows import read_rows
from benchmarks.harness.workloads import EPOCH, STANDARD, TINY, Batch
from benchmarks.shapes import BUDGET, CHECKPOINT, FIT, PLAIN, STEPS, Row, draw, page, shapes_of


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


@pytest.mark.parametrize("name", STANDARD)
def test_at_least_half_of_the_steps_have_other_sizes_than_all_before(name: str) -> None:
    assert len({shapes_of(STANDARD[name].batch(step)) for step in range(STEPS)}) >= STEPS // 2


@pytest.mark.parametrize("name", TINY)
def test_batches_are_the_same_each_time_and_the_last_one_of_an_epoch_is_smaller(name: str) -> None:
    workload = TINY[name]
    model, _ = workload.case.build()
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        losses.append(loss_of(model, workload.batch(3)))
    assert losses[0].isfinite()
    assert torch.equal(losses[0], losses[1])
    first, last = (shapes_of(workload.batch(step)) for step in (0, EPOCH - 1))
    assert len(last) < len(first) or last[0][0] < first[0][0]


def test_the_detector_predicts_the_edges_of_the_box_around_each_pixel() -> None:
    detector, _ = TINY["detection"].case.build()
    assert detector.stride == 4  # pixels of the last stage have their centers at 2, 6, 10, …, 30
    boxes = torch.tensor([[2.0, 3.0, 17.0, 30.0], [20.0, 1.0, 31.0, 9.0]])
    found, placed = detector.losses(torch.zeros(8, 8), torch.zeros(4, 8, 8), boxes)
    assert torch.allclose(found, torch.tensor(2.0).log())
    pixels = torch.tensor([[4 * 6], [3 * 2]])  # columns and rows whose centers lie in the box
    assert torch.allclose(placed, (pixels * boxes).sum() / 4 / pixels.sum())


def test_a_tiny_run_is_exact_and_within_its_budget(tmp_path: Path) -> None:
    arguments = ["--quick", "--only", "gpt2", "--steps", "6", "--out", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "shapes", *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    rows, _ = read_rows(tmp_path / "shapes.json", Row)
    assert [row.variant for row in rows] == [PLAIN, CHECKPOINT, FIT, BUDGET]
    assert all(row.equal_losses and row.equal_results and not row.error for row in rows)
    fitted = rows[2]
    assert fitted.held
    assert (fitted.profiled_steps or 0) >= 2
    assert (fitted.plans or 0) >= 1
    assert (tmp_path / "shapes.md").exists()
    assert (tmp_path / "shapes.png").stat().st_size > 0


GOOD = Row(
    "gpt2", "GPT-2", FIT, 0.6, 600, 1000, 120, 200, equal_losses=True, equal_results=True, highest_bytes=594,
    steps_over=0, plain_s=10.0, total_s=12.5, settled=1.1, profiled_steps=2, unplanned_steps=3, plans=4, planning_s=5.0,
)  # fmt: skip


def test_the_page_has_a_table_for_each_workload_and_names_every_fault() -> None:
    plain = replace(GOOD, variant=PLAIN, share=None, budget_bytes=None, highest_bytes=1000, steps_over=None)
    text = page([plain, GOOD], {})
    assert "All runs of lowtide are bit-equal and within their budget in every step." in text
    assert "| lowtide.fit, 60 % | 1.25 × | 1.10 × | 99.0 % of budget | 0 | yes | 2 | 3 | 4 | 5.0 s |" in text
    rows = [
        plain,
        replace(GOOD, highest_bytes=606, steps_over=2),
        replace(GOOD, variant=BUDGET, equal_losses=False),
        replace(GOOD, share=0.35, warnings=("no plan fits",)),
        Row("gpt2", "GPT-2", BUDGET, 0.35, 350, 1000, 120, 200, error="step 7: BudgetError: needs more\nmore lines"),
        replace(plain, variant=CHECKPOINT, equal_results=False),
    ]
    text = page(rows, {})
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        "- gpt2, lowtide.fit, 60 %: 2 of 200 steps over the budget, up to 101.0 %",
        "- gpt2, lowtide.budget, 60 %: only results bit-equal",
        "- gpt2, lowtide.fit, 35 %: warning: no plan fits",
        "- gpt2, lowtide.budget, 35 %: step 7: BudgetError: needs more",
    ]
    assert "| checkpoint | 1.25 × | 1.10 × | 100.0 % of plain | – | only losses |" in text
    assert "| lowtide.budget, 35 % | stopped |" in text


def test_the_plot_leaves_out_runs_that_stopped(tmp_path: Path) -> None:
    draw([GOOD, replace(GOOD, workload="bert", total_s=None, error="stopped")], tmp_path / "shapes.png")
    assert (tmp_path / "shapes.png").stat().st_size > 0
