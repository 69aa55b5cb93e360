"""Where a benchmark ran: processor, versions, date, and what the allocator was told."""

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
"""glibc gives large blocks back to the system and faults them in again; which of them, differs from step to step
and costs more than what is measured here. So it is told to keep them, and to ask for huge pages, of which there are
fewer to fault in; for all variants alike."""
RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("lowtide", "torch", "transformers", "numpy", "scipy", "torch_remat")


def keep_freed_memory(module: str) -> None:
    """Start this program again, as `python -m module`, with `ALLOCATOR` in its environment, unless it is there."""
    if not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | ALLOCATOR)


def one_quiet_thread() -> None:
    """One thread for torch; no remarks from transformers."""
    import torch
    import transformers

    torch.set_num_threads(1)
    library: Any = transformers
    library.logging.set_verbosity_error()


def processor() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def allocator() -> dict[str, str]:
    """What the environment tells glibc's allocator."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}


def describe() -> dict[str, Any]:
    """Everything about this machine and this moment that a result depends on."""
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
    """Processor, threads, versions and date of what `describe` gave."""
    numbers = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return (
        f"{machine['processor']}, {machine['threads']} thread, {numbers}; {machine['date'][:16].replace('T', ' ')} UTC"
    )
