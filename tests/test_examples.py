"""The examples run and show the documented results. An example that differs from plain PyTorch ends with an error.

`wave_adjoint.py` is run in tests/chain/test_adjoint_uses.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *options: str) -> str:
    result = subprocess.run([sys.executable, str(EXAMPLES / name), *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-2000:]
    return result.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short_and_have_a_docstring(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) <= 100
    assert text.startswith('"""')
    assert "lowtide._" not in text, "an example uses public names"


def test_train_gpt2_gives_the_same_losses_in_less_memory() -> None:
    plain, ours = (run("train_gpt2.py", "--policy", policy, "--steps", "3") for policy in ("KeepAll()", "EveryN(2)"))
    assert re.findall(r"loss .*", plain) == re.findall(r"loss .*", ours)
    assert len(re.findall(r"loss .*", plain)) == 3
    peaks = [number(r"peak ([\d.]+)", out) for out in (plain, ours)]
    assert peaks[1] < 0.7 * peaks[0]


def test_fit_vision_trains_the_same_in_its_share() -> None:
    out = run("fit_vision.py", "--steps", "2", "--share", "0.5")
    assert "bit-equal: True" in out
    assert (
        number(r"fitted peak +([\d.]+)", out) <= 0.5 * number(r"plain peak +([\d.]+)", out) + 0.1
    )  # one digit is shown


def test_will_it_fit_predicts_both_outcomes_correctly(tmp_path: Path) -> None:
    out = run("will_it_fit.py", "--plot", str(tmp_path / "frontier.png"))
    assert re.search(r"batch +8 +yes", out)
    assert re.search(r"batch +64 +no; the smallest budget that works is [\d.]+ MiB", out)
    assert "bit-equal to plain PyTorch's: True" in out
    assert number(r"peak ([\d.]+) MiB measured", out) <= 30
    assert (tmp_path / "frontier.png").stat().st_size > 5000


def test_offload_to_disk_is_exact_in_each_way() -> None:
    out = run("offload_to_disk.py", "--share", "0.4")
    assert out.count("bit-equal: True") == 3
    assert number(r"([\d.]+) MiB written", out) > 0
    assert number(r"plain peak ([\d.]+) MiB", out) > 2 * number(r"MiB, budget ([\d.]+) MiB", out)
