"""The command line: help, lazy imports, completion and the demo."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

import lowtide
from lowtide.cli import main

COMMANDS = ("plan", "frontier", "run", "demo", "doctor", "completion")


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_help_lists_all_commands_and_exit_codes() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout
    assert "3 a budget that cannot be met" in unwrapped(result.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0
    _, _, examples = result.stdout.partition("Examples:\n")
    assert examples.lstrip().startswith(f"lowtide {name}")
    assert CliRunner().invoke(main, [name, "-h"]).stdout == result.stdout


def test_short_help_option_works_after_a_call_without_the_group() -> None:
    """Runs in a new process, because click caches the help option of the first call."""
    code = (
        "from click.testing import CliRunner; from lowtide.cli import main; from lowtide.cli.run import run\n"
        "CliRunner().invoke(run, ['--help'])\n"
        "assert 'Usage' in CliRunner().invoke(main, ['run', '-h']).stdout"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert all(option.help for option in options)


def test_help_lists_presets() -> None:
    from lowtide.cli._presets import PRESETS

    for name in ("plan", "frontier"):
        text = CliRunner().invoke(main, [name, "--help"]).stdout
        assert all(f"\n    {preset} " in text for preset in PRESETS)


def test_version_unknown_command_and_invalid_option() -> None:
    assert lowtide.__version__ in CliRunner().invoke(main, ["--version"]).output
    result = CliRunner().invoke(main, ["nonsense"])
    assert result.exit_code == 2
    assert "No such command 'nonsense'" in result.output
    result = CliRunner().invoke(main, ["demo", "--layers", "1"])
    assert result.exit_code == 2
    assert "2<=x<=48" in result.output


def test_help_and_completion_do_not_import_torch() -> None:
    lines = [
        "import os, sys",
        "from lowtide.cli import main",
        "for args in (['--help'], ['plan', '--help'], ['frontier', '--help'], ['doctor', '-h'], ['demo', '-h'],",
        "             ['completion', 'zsh'], ['--version']):",
        "    try: main(args, prog_name='lowtide')",
        "    except SystemExit as end: assert end.code == 0, args",
        "os.environ.update(COMP_WORDS='lowtide ', COMP_CWORD='1', _LOWTIDE_COMPLETE='zsh_complete')",
        "try: main([], prog_name='lowtide', complete_var='_LOWTIDE_COMPLETE')",
        "except SystemExit as end: assert end.code == 0",
        "assert not {'torch', 'numpy', 'scipy', 'transformers'} & set(sys.modules)",
    ]
    out = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    completions = out.stdout.rpartition(f"version {lowtide.__version__}\n")[2].split("\n")
    assert set(COMMANDS) <= set(completions)


def test_python_m_lowtide_runs_the_command() -> None:
    out = subprocess.run([sys.executable, "-m", "lowtide", "--version"], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == f"lowtide, version {lowtide.__version__}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_LOWTIDE_COMPLETE={shell}_complete" in result.stdout


def test_completion_rejects_an_unknown_shell() -> None:
    result = CliRunner().invoke(main, ["completion", "cmd"])
    assert result.exit_code == 2
    assert "'cmd' is not one of 'bash', 'zsh', 'fish'" in result.stderr


def test_preset_names_are_completed() -> None:
    from click.shell_completion import ShellComplete

    complete = ShellComplete(main, {}, "lowtide", "_LOWTIDE_COMPLETE")
    found = [item.value for item in complete.get_completions(["plan", "--preset"], "gpt2")]
    assert found == ["gpt2-tiny", "gpt2-small"]
    assert [item.value for item in complete.get_completions([], "f")] == ["frontier"]


def test_demo_results_are_exact_and_within_budgets() -> None:
    from lowtide.cli._demo_run import run

    console = Console(record=True, width=120)
    table = run(layers=2, steps=2, console=console)
    text = console.export_text()
    assert table.row_count == 7
    assert text.count("bit-equal") == 7
    assert "DIFFERENT" not in text
    share = {line.split("│")[1].strip(): line.split("│")[3].strip() for line in text.splitlines() if "%" in line}
    assert share["plain PyTorch"] == "100 %"
    percent = {k: int(v.removesuffix(" %")) for k, v in share.items()}
    assert percent["lowtide.fit, peak of checkpoint"] <= percent["torch.utils.checkpoint"]
    assert percent["lowtide.fit, half the plain peak"] <= 50
    assert text.count(" MiB, × ") == 2  # predicted peak and time of the two plans
    assert percent["lowtide EveryN(1)"] < 80
    assert percent["lowtide SaveOps(matmuls)"] < 80
    assert percent["lowtide EveryN(2)"] <= 100  # both layers are one segment, so little is saved


def test_missing_package_error_has_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner().invoke(main, ["demo", "--layers", "2"])
    assert result.exit_code == 1
    assert result.stderr == """Error: the demo needs the package 'transformers': pip install "lowtide[demo]"\n"""
