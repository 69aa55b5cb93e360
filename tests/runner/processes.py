"""Programs in processes of their own: plain Python, `lowtide run`, and what each took."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SCRIPTS = Path(__file__).parent / "scripts"
LOWTIDE = (sys.executable, "-m", "lowtide", "run")

# glibc keeps freed memory for itself unless it is told not to: with these, large blocks go back to the system at once,
# and resident memory shows what is alive. Plain and fitted programs get the same.
ENVIRONMENT = {
    **os.environ,
    "MALLOC_MMAP_THRESHOLD_": str(2**17),
    "MALLOC_TRIM_THRESHOLD_": str(2**17),
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


class Done(NamedTuple):
    """How a program ended."""

    status: int
    """The exit code, or minus the signal."""
    out: str
    err: str
    resident_bytes: int
    """The most resident memory it ever had, with that of its imports."""


def run(*command: str | Path, cwd: Path | None = None, stdin: str = "") -> Done:
    """Run a command to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, tempfile.TemporaryFile("w+") as fed:
        fed.write(stdin)
        fed.seek(0)
        child = subprocess.Popen(
            [str(part) for part in command], stdin=fed, stdout=out, stderr=err, cwd=cwd, env=ENVIRONMENT
        )
        resident = 0
        while child.poll() is None:
            resident = max(resident, _most_resident_bytes(child.pid))
            time.sleep(0.005)
        out.seek(0)
        err.seek(0)
        return Done(child.returncode, out.read(), err.read(), resident)


def _most_resident_bytes(pid: int) -> int:
    """What the system says so far. (`ru_maxrss` would count what the parent had resident before the program began.)"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def both(script: Path, *args: str, stdin: str = "") -> tuple[Done, Done]:
    """A script by plain Python, and by `lowtide run --quiet`, started in its directory."""
    plain = run(sys.executable, script.name, *args, cwd=script.parent, stdin=stdin)
    ours = run(*LOWTIDE, "--quiet", "--budget", "1GiB", script.name, *args, cwd=script.parent, stdin=stdin)
    return plain, ours
