"""Unmodified scripts in half of their memory: bit-equal results, lower tensor peak, lower resident memory."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lowtide._units import parse_bytes

from .processes import LOWTIDE, SCRIPTS, Result, run

MEASURE_PEAK = Path(__file__).parent / "measure_peak.py"
TIMES = re.compile(r"runtime|per_second")


def new_directory(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


def plain_peak_bytes(parent: Path, *command: str | Path) -> int:
    """Return the peak of live tensor bytes of a run without lowtide."""
    file = parent / "peak"
    result = run(sys.executable, MEASURE_PEAK, file, *command, cwd=new_directory(parent, "measured"))
    assert result.status == 0, result.err
    return int(file.read_text())


def printed_lines(result: Result) -> list[str]:
    """Return the lines that a script printed, without times."""
    assert result.status == 0, result.err
    lines = [line for line in result.out.splitlines() if not TIMES.search(line)]
    assert lines
    return lines


def reported_peak_bytes(result: Result) -> int:
    found = re.search(r"the peak was ([\d.]+ \w+), within the budget", result.err)
    assert found, result.err
    return parse_bytes(found[1])


TWO_STEPS = {"train_gpt.py": "--max_iters=2", "train_cnn.py": "--batches=2", "train_trainer.py": "--steps=2"}


@pytest.mark.parametrize("name", TWO_STEPS)
def test_results_are_equal_with_half_of_the_memory(name: str, tmp_path: Path) -> None:
    script = SCRIPTS / name
    peak = plain_peak_bytes(tmp_path, script, TWO_STEPS[name])
    assert peak > 280 * 2**20, "activations should dominate"
    budget = peak // 2
    plain = run(sys.executable, script, cwd=new_directory(tmp_path, "plain"))
    ours = run(*LOWTIDE, "--budget", f"{budget}B", script, cwd=new_directory(tmp_path, "ours"))
    assert printed_lines(ours) == printed_lines(plain)
    weights = [file.relative_to(tmp_path / "plain") for file in (tmp_path / "plain").rglob("*.safetensors")]
    assert bool(weights) == (name == "train_trainer.py")
    for file in weights:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert reported_peak_bytes(ours) <= budget
    assert re.search(r"steps +\d: [12] online, [12] planned", ours.err), ours.err
    assert ours.err.count("lowtide run") == 1, "data loader workers print no summary"
    # lowtide itself also uses resident memory, so only a quarter of the saved tensor bytes is required.
    assert ours.resident_bytes < plain.resident_bytes - (peak - budget) // 4
