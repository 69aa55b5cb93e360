"""`lowtide frontier` on small models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Command = Callable[..., Result]
ARGS = ("frontier", "--preset", "gpt2-tiny", "--batch", "2", "--seq", "32", "--points", "3", "--deadline", "1")


def test_table_and_all_output_files(lowtide_command: Command, tmp_path: Path) -> None:
    files = {suffix: tmp_path / f"frontier.{suffix}" for suffix in ("json", "html", "png")}
    outputs = [arg for suffix, path in files.items() for arg in (f"--{suffix}", str(path))]
    result = lowtide_command(*ARGS, *outputs)
    assert result.exit_code == 0
    assert "of plain" in result.stdout
    assert "every block" in result.stdout
    assert "1 of 3" in result.stderr
    assert "3 of 3" in result.stderr
    document = json.loads(files["json"].read_text())
    points = document["points"]
    assert points[0]["peak_bytes"] < points[-1]["peak_bytes"] == document["plain_peak_bytes"]
    assert points[0]["step_s"] > points[-1]["step_s"]
    page = files["html"].read_text(encoding="utf-8")
    assert "every block" in page
    assert "<svg" in page
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_json_on_stdout_is_the_only_output(lowtide_command: Command, own_models: Path) -> None:
    result = lowtide_command(
        "frontier", "own_models:build", "--loss", "own_models:loss", "--points", "2", "--deadline", "1", "--json", "-"
    )
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["points"]) == 2


def test_at_least_two_points_are_required(lowtide_command: Command) -> None:
    result = lowtide_command("frontier", "--preset", "gpt2-tiny", "--points", "1")
    assert result.exit_code == 2
    assert "1 is not in the range x>=2" in result.stderr


def test_the_frontier_of_the_largest_length(lowtide_command: Command) -> None:
    args = (
        "frontier",
        "--preset",
        "gpt2-tiny",
        "--batch",
        "2",
        "--points",
        "2",
        "--deadline",
        "1",
        "--json",
        "-",
        "-q",
    )
    peaks = {}
    for option in (("--seq", "200"), ("--length", "16..200")):
        result = lowtide_command(*args, *option, "--json", "-")
        assert result.exit_code == 0, result.stderr
        peaks[option[0]] = json.loads(result.stdout)["plain_peak_bytes"]
    assert peaks["--length"] == pytest.approx(peaks["--seq"], rel=0.02)
