"""The benchmarks run. Their results are not checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_overhead_runs_and_prints_every_variant() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.overhead", "--rounds", "1", "--gpt2-rounds", "0"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert result.returncode == 0, result.stderr
    for variant in ("plain", "lowtide KeepAll", "lowtide KeepNone", "SAC, keep products", "torch checkpoint"):
        assert f"\n{variant}" in result.stdout
    assert "1 thread" in result.stdout
