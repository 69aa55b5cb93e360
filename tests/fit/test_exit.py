"""Processes that used lowtide end normally, also on a busy machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .exit_script import PROCESSES


def test_processes_end_normally_under_load() -> None:
    """Twenty processes at once with steps, scopes and collectives; a crash at exit is a negative status."""
    script = Path(__file__).with_name("exit_script.py")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.strip() == str([0] * PROCESSES), result.stderr[-2000:]
