"""Unmodified scripts in half of their memory: the same results bit for bit, by lowtide's count and the system's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lowtide._units import parse_bytes

from .processes import LOWTIDE, SCRIPTS, Done, run

METERED = Path(__file__).parent / "metered.py"
TIMES = re.compile(r"runtime|per_second")


def directory(parent: Path, name: str) -> Path:
    made = parent / name
    made.mkdir()
    return made


def plain_peak_bytes(parent: Path, *command: str | Path) -> int:
    """The most live tensor bytes of the script by itself, measured in a run of its own."""
    file = parent / "peak"
    done = run(sys.executable, METERED, file, *command, cwd=directory(parent, "metered"))
    assert done.status == 0, done.err
    return int(file.read_text())


def results(done: Done) -> list[str]:
    """What a script has printed, without times."""
    assert done.status == 0, done.err
    lines = [line for line in done.out.splitlines() if not TIMES.search(line)]
    assert lines
    return lines


def said_peak_bytes(done: Done) -> int:
    found = re.search(r"the peak was ([\d.]+ \w+), within the budget", done.err)
    assert found, done.err
    return parse_bytes(found[1])


TWO_STEPS = {"train_gpt.py": "--max_iters=2", "train_cnn.py": "--batches=2", "train_trainer.py": "--steps=2"}


@pytest.mark.parametrize("name", TWO_STEPS)
def test_half_of_the_memory_and_the_same_results(name: str, tmp_path: Path) -> None:
    script = SCRIPTS / name
    peak = plain_peak_bytes(tmp_path, script, TWO_STEPS[name])
    assert peak > 280 * 2**20, "activations should dominate"
    budget = peak // 2
    plain = run(sys.executable, script, cwd=directory(tmp_path, "plain"))
    ours = run(*LOWTIDE, "--budget", f"{budget}B", script, cwd=directory(tmp_path, "ours"))
    assert results(ours) == results(plain)
    weights = [file.relative_to(tmp_path / "plain") for file in (tmp_path / "plain").rglob("*.safetensors")]
    assert bool(weights) == (name == "train_trainer.py")
    for file in weights:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert said_peak_bytes(ours) <= budget
    assert re.search(r"steps +\d: [12] online, [12] planned", ours.err), ours.err
    assert ours.err.count("lowtide run") == 1, "workers say nothing"
    # lowtide and its planner are in it too; most of what the tensors give up is really gone.
    assert ours.resident_bytes < plain.resident_bytes - (peak - budget) // 4
