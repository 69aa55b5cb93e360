"""The command `lowtide run`: invalid arguments, summary, report, plan cache and torchrun."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from lowtide.cli._options import STORES
from lowtide.cli.run import run as command
from lowtide.stores.names import NAMES

from .processes import LOWTIDE, SCRIPTS, run

TRAIN = """
    import torch
    torch.manual_seed(0)
    layers = (m for _ in range(8) for m in (torch.nn.Linear(128, 128), torch.nn.Tanh()))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(4096, 128)).square().mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN))
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "Missing option '--budget'"),
        (["--budget", "1GiB"], "Missing argument 'SCRIPT|MODULE'"),
        (["--budget", "8", "train.py"], "write a number and a unit"),
        (["--budget", "1GiB", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["--budget", "1GiB", "."], "there is no script '.'"),
        (["--budget", "1GiB", "--store", "cloud", "train.py"], "'cloud' is not one of 'device', 'host', 'disk'"),
        (["--budget", "1GiB", "--report", "no/where.html", "train.py"], "no directory"),
        (["--budget", "1GiB", "--speed", "train.py"], "No such option '--speed'"),
    ],
)
def test_invalid_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_help_has_an_example_and_all_stores() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    assert "lowtide run --budget 8GiB train.py" in result.output
    assert STORES == NAMES


def test_report_and_plan_cache(script: Path, tmp_path: Path) -> None:
    report, plans = tmp_path / "report.html", tmp_path / "plans"
    options = ("--budget", "20MiB", "--cache", plans, "--store", "disk")
    first = run(*LOWTIDE, *options, "--report", report, script)
    assert first.status == 0, first.err
    assert "Sequential" in first.err
    assert "1 online, 3 planned" in first.err
    predicted = re.search(r"peak +([\d.]+ MiB) predicted", first.err)
    assert predicted
    assert predicted[1] in report.read_text()
    second = run(*LOWTIDE, *options, "--report", tmp_path / "none.html", script)
    assert second.out == first.out
    assert "0 online, 4 planned" in second.err
    assert "came from the cache" in second.err


def test_budget_is_too_small(script: Path) -> None:
    result = run(*LOWTIDE, "--budget", "3MiB", script)
    assert result.status == 3
    assert f'File "{script}", line 9, in <module>' in result.err
    assert "BudgetError" in result.err
    assert "lowtide/engine" not in result.err
    assert "the budget of 3.00 MiB could not be met" in result.err
    assert re.search(r"increase --budget, at least to \d\.\d\d MiB, try --store disk", result.err)
    assert "no step was completed; called: Sequential." in result.err
    assert {float(size) for size in re.findall(r"budget of ([\d.]+) MiB", result.err)} == {3.0}


def test_summary_of_a_run_that_stops_on_the_budget(tmp_path: Path) -> None:
    """The third batch is too large. The two steps before it are in the summary."""
    path = tmp_path / "grows.py"
    path.write_text(textwrap.dedent(TRAIN).replace("torch.randn(4096", "torch.randn((256, 256, 2**16)[_]"))
    result = run(*LOWTIDE, "--budget", "12MiB", "--store", "disk", path)
    assert result.status == 3
    assert "the budget of 12.00 MiB could not be met: increase --budget, at least to" in result.err
    assert "--store disk" not in result.err
    assert "the peak was" in result.err
    assert "1 step signature;" in result.err
    assert "2: 1 online, 1 planned" in result.err


def test_a_budget_of_the_script_is_not_called_the_users(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import lowtide, torch\nmodel = torch.nn.Linear(64, 64)\nx = torch.randn(2**15, 64)\n"
        "model(x[:8]).sum().backward()\nwith lowtide.budget('9 MiB'):\n    model(x).exp()\n"
    )
    result = run(*LOWTIDE, "--budget", "1GiB", path)
    assert result.status == 3
    assert "a budget that it set itself, 9.00 MiB, could not be met" in result.err
    assert "increase --budget" not in result.err
    assert "1: 1 online, 0 planned" in result.err


@pytest.mark.parametrize(
    ("batch", "steps", "reason"),
    [
        (
            "*(2,) * (_ + 1)",
            4,
            "no step signature was repeated. The signatures differ in number of dimensions",
        ),
        ("64", 1, "there was only one step"),
    ],
)
def test_summary_says_why_no_step_was_planned(tmp_path: Path, batch: str, steps: int, reason: str) -> None:
    path = tmp_path / "never.py"
    source = textwrap.dedent(TRAIN).replace("4096", batch).replace("range(4)", f"range({steps})")
    path.write_text(source)
    result = run(*LOWTIDE, "--budget", "1GiB", path)
    assert result.status == 0, result.err
    assert f"{steps}: {steps} online, 0 planned" in result.err
    assert f"no plan  {reason}" in result.err


def test_summary_lists_models_that_trained_without_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "refused.py"
    path.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 2)\nmodel.weight.full_tensor = model.weight.detach\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
    )
    result = run(*LOWTIDE, "--budget", "1GiB", path)
    assert result.status == 0, result.err
    assert "Linear was trained without a budget: lowtide run does not support sharded parameters" in result.err


def test_script_without_training(tmp_path: Path) -> None:
    path = tmp_path / "infer.py"
    path.write_text("import torch\nwith torch.no_grad():\n    torch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    result = run(*LOWTIDE, "--budget", "1GiB", path)
    assert result.status == 0
    assert "no training step was found" in result.err


def test_torch_is_imported_by_the_script(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('torch') is not None\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(torch.__spec__.loader.get_filename() == torch.__file__)\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
    )
    result = run(*LOWTIDE, "--budget", "1GiB", path)
    assert result.out == "True\n"
    assert "1 online, 0 planned" in result.err


def test_torchrun_with_two_ranks(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for _ in range(3):  # on a loaded machine, torchrun without lowtide sometimes aborts at exit
        plain = run(*torchrun, SCRIPTS / "train_ddp.py")
        if plain.status == 0:
            break
    assert plain.status == 0, plain.err
    assert plain.out.count("step") == 6
    options = ("--budget", "3MiB", "--report", tmp_path / "report.html")
    ours = run(*torchrun, "-m", "lowtide", "run", *options, SCRIPTS / "train_ddp.py")
    assert ours.status == 0, ours.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.rank1.html"]
    assert ours.out == plain.out
    for rank in (0, 1):
        assert f"lowtide run, rank {rank}: the peak was" in ours.err
    assert ours.err.count("within the budget of 3.00 MiB") == 2
    # The first step begins without gradients. The second one leaves new buckets of DDP behind, so it is profiled again.
    assert ours.err.count("3 online, 3 planned") == 2
