"""The examples run as they are, and show what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def run(example: Path, *options: str) -> str:
    result = subprocess.run([sys.executable, str(example), *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_short_and_say_what_they_are_for(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) <= 100
    assert text.startswith('"""')


def test_train_gpt2_gives_the_same_losses_in_less_memory() -> None:
    example = next(e for e in EXAMPLES if e.name == "train_gpt2.py")
    plain, ours = (run(example, "--rule", rule, "--steps", "3") for rule in ("KeepAll()", "EveryN(2)"))
    assert re.findall(r"loss .*", plain) == re.findall(r"loss .*", ours)
    assert len(re.findall(r"loss .*", plain)) == 3
    peaks = [float(re.search(r"peak ([\d.]+)", out)[1]) for out in (plain, ours)]
    assert peaks[1] < 0.7 * peaks[0]
