"""Run scripts in new processes, with plain Python or `lowtide run`, and measure their resident memory."""

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

_ROOT = Path(__file__).parents[2]

# With the MALLOC variables glibc returns large freed blocks to the system at once, so that resident memory follows the
# live tensors.
ENVIRONMENT = {
    **os.environ,
    "MALLOC_MMAP_THRESHOLD_": str(2**17),
    "MALLOC_TRIM_THRESHOLD_": str(2**17),
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (_ROOT / "src", _ROOT))),
}


class Result(NamedTuple):
    """Exit status, output and memory of a process."""

    status: int
    """Exit code, or the negative signal number."""
    out: str
    err: str
    resident_bytes: int
    """Peak resident memory, including imports."""


def run(*command: str | Path, cwd: Path | None = None, stdin: str = "") -> Result:
    """Run a command and wait until it exits."""
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        tempfile.TemporaryFile("w+") as input_file,
    ):
        input_file.write(stdin)
        input_file.seek(0)
        child = subprocess.Popen(
            [str(part) for part in command], stdin=input_file, stdout=out, stderr=err, cwd=cwd, env=ENVIRONMENT
        )
        resident = 0
        while child.poll() is None:
            resident = max(resident, _peak_resident_bytes(child.pid))
            time.sleep(0.005)
        out.seek(0)
        err.seek(0)
        return Result(child.returncode, out.read(), err.read(), resident)


def _peak_resident_bytes(pid: int) -> int:
    """Return the peak resident memory so far. `ru_maxrss` would include the memory of the parent before exec."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def run_both(script: Path, *args: str, stdin: str = "") -> tuple[Result, Result]:
    """Run a script with plain Python and with `lowtide run --quiet`, in the directory of the script."""
    plain = run(sys.executable, script.name, *args, cwd=script.parent, stdin=stdin)
    ours = run(*LOWTIDE, "--quiet", "--budget", "1GiB", script.name, *args, cwd=script.parent, stdin=stdin)
    return plain, ours
