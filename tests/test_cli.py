"""The command line: the demo for real, and what it says when something is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console

import lowtide
from lowtide.cli import main


def test_help_teaches() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
    result = CliRunner().invoke(main, ["demo", "--help"])
    assert "compare peak memory, time and gradients" in " ".join(result.output.split())
    assert "--layers" in result.output


def test_version_and_wrong_words() -> None:
    assert lowtide.__version__ in CliRunner().invoke(main, ["--version"]).output
    wrong = CliRunner().invoke(main, ["nonsense"])
    assert wrong.exit_code == 2
    assert "No such command 'nonsense'" in wrong.output
    wrong = CliRunner().invoke(main, ["demo", "--layers", "1"])
    assert wrong.exit_code == 2
    assert "2<=x<=48" in wrong.output


def test_the_module_is_the_command() -> None:
    out = subprocess.run([sys.executable, "-m", "lowtide", "--version"], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == f"lowtide, version {lowtide.__version__}"


def test_the_demo_trains_and_tells_the_truth() -> None:
    from lowtide.cli.demo import run

    console = Console(record=True, width=120)
    table = run(layers=2, steps=1, console=console)
    text = console.export_text()
    assert table.row_count == 5
    assert text.count("to the bit") == 5
    assert "NO" not in text
    share = {line.split("│")[1].strip(): line.split("│")[3].strip() for line in text.splitlines() if "%" in line}
    assert share["plain PyTorch"] == "100 %"
    percent = {k: int(v.removesuffix(" %")) for k, v in share.items()}
    assert percent["lowtide EveryN(1)"] < 80
    assert percent["lowtide SaveOps(matmuls)"] < 80
    assert percent["lowtide EveryN(2)"] <= 100  # two layers in one segment: hardly a saving


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.cli import demo

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(lowtide.MissingPackageError, match=r'pip install "lowtide\[demo\]"'):
        demo._model(2)
