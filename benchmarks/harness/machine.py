"""Machine of a benchmark: processor, versions, date and allocator settings."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Settings for all variants: glibc keeps freed memory and uses huge pages.

By default glibc returns large blocks to the system, and their pages fault again when they are reused. The number of
faults differs from step to step, and their time exceeds the differences that are measured here."""
RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("lowtide", "torch", "transformers", "numpy", "scipy", "torch_remat")


def keep_freed_memory(module: str) -> None:
    """Restart this program as `python -m module` with `ALLOCATOR` in its environment, unless it is set already."""
    if not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | ALLOCATOR)


def use_one_thread() -> None:
    """Use one torch thread, and silence warnings of transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    library: Any = transformers
    library.logging.set_verbosity_error()


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def allocator() -> dict[str, str]:
    """Return the environment variables of glibc's allocator."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}


def describe() -> dict[str, Any]:
    """Return machine, versions, settings and date."""
    return {
        "processor": processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "threads": 1,
        "versions": versions(),
        "allocator": allocator(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """Return processor, threads, versions and date of a result of `describe` in one line."""
    numbers = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['threads']} thread, {numbers}; {machine['date'][:16].replace('T', ' ')} UTC"
    )
