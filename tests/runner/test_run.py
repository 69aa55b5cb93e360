"""The command `lowtide run`: what it refuses, what it says at exit, its files, and that it goes with torchrun."""

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
def test_wrong_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_the_help_teaches() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    assert "lowtide run --budget 8GiB train.py" in result.output
    assert STORES == NAMES


def test_plans_and_page_are_kept(script: Path, tmp_path: Path) -> None:
    page, plans = tmp_path / "page.html", tmp_path / "plans"
    options = ("--budget", "20MiB", "--cache", plans, "--store", "disk")
    first = run(*LOWTIDE, *options, "--report", page, script)
    assert first.status == 0, first.err
    assert "Sequential" in first.err
    assert "1 online, 3 planned" in first.err
    predicted = re.search(r"peak +([\d.]+ MiB) predicted", first.err)
    assert predicted
    assert predicted[1] in page.read_text()
    second = run(*LOWTIDE, *options, "--report", tmp_path / "none.html", script)
    assert second.out == first.out
    assert "0 online, 4 planned" in second.err
    assert "came from the cache" in second.err


def test_a_budget_that_is_too_small(script: Path) -> None:
    done = run(*LOWTIDE, "--budget", "3MiB", script)
    assert done.status == 3
    assert f'File "{script}", line 9, in <module>' in done.err
    assert "BudgetError" in done.err
    assert "a larger budget" in done.err
    assert "lowtide/engine" not in done.err
    assert "the budget of 3.00 MiB could not be held" in done.err
    assert "give it more with --budget" in done.err


def test_nothing_to_train(tmp_path: Path) -> None:
    path = tmp_path / "infer.py"
    path.write_text("import torch\nwith torch.no_grad():\n    torch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    done = run(*LOWTIDE, "--budget", "1GiB", path)
    assert done.status == 0
    assert "no training step was found" in done.err


def test_torch_is_imported_when_the_script_does(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('torch') is not None\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(torch.__spec__.loader.get_filename() == torch.__file__)\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"
    )
    done = run(*LOWTIDE, "--budget", "1GiB", path)
    assert done.out == "True\n"
    assert "1 online, 0 planned" in done.err


def test_under_torchrun(tmp_path: Path) -> None:
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for _ in range(3):  # under load plain torchrun itself now and then aborts at interpreter exit
        plain = run(*start, SCRIPTS / "train_ddp.py")
        if plain.status == 0:
            break
    assert plain.status == 0, plain.err
    assert plain.out.count("step") == 6
    options = ("--budget", "3MiB", "--report", tmp_path / "page.html")
    ours = run(*start, "-m", "lowtide", "run", *options, SCRIPTS / "train_ddp.py")
    assert ours.status == 0, ours.err
    assert sorted(page.name for page in tmp_path.iterdir()) == ["page.html", "page.rank1.html"]
    assert ours.out == plain.out
    for rank in (0, 1):
        assert f"lowtide run, rank {rank}: the peak was" in ours.err
    assert ours.err.count("within the budget of 3.00 MiB") == 2
    assert ours.err.count("4 online, 2 planned") == 2  # DDP sorts its buckets anew in the second step
