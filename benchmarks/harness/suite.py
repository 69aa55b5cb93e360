"""The suite of `make bench`: all benchmarks in a row, each in its own process. No torch.

A part that fails is reported, and the others still run. The output of a part that only prints is saved as a page with
machine, versions and date.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .machine import describe, machine_line

ROOT = Path(__file__).parents[2]
RESIDENT_MINUTES = 4.0
"""Time reserved for resident memory, pages and plots, after all models."""


@dataclass(frozen=True)
class Part:
    """One command."""

    title: str
    arguments: tuple[str, ...]
    page: str | None = None
    """File for the printed output; None if the command writes its own pages."""
    expected_minutes: float = 0.0
    """Duration on one core on which a plain step of the standard models takes about a second."""
    limited: bool = False
    """Whether the command gets the remaining time as `--minutes`."""


def suite_parts(out: Path, quick: bool) -> tuple[Part, ...]:
    """Return all parts, the short ones first: the last one gets the remaining time."""
    output = ("--out", str(out), *(("--quick",) if quick else ()))
    overhead = ("--rounds", "2", "--gpt2-rounds", "0") if quick else ("--rounds", "25", "--gpt2-rounds", "6")
    schedules = ("--rounds", "1" if quick else "3", "--skip-slow")  # the peers take minutes on the slow ones
    return (
        Part("Cost of recording", ("benchmarks.overhead", *overhead), "overhead.md", 4),
        Part("Schedules compared with other packages", ("benchmarks.schedules", *schedules), "schedules.md", 2),
        Part("Scaling", ("benchmarks", "scaling", *output), None, 6),
        Part("lowtide compared with its peers", ("benchmarks", "run", *output), None, 45, limited=not quick),
    )


def run_parts(parts: tuple[Part, ...], out: Path, minutes: float, log: Callable[[str], None]) -> int:
    """Run all parts; return the number of failures."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    expected = ", ".join(f"{part.title.lower()} ({part.expected_minutes:g} min)" for part in parts)
    log(f"{len(parts)} parts: {expected}; limit {minutes:g} min")
    failed = 0
    for number, part in enumerate(parts, 1):
        left = minutes - (time.monotonic() - started) / 60
        log(f"[part {number} of {len(parts)}] {part.title}; {left:.0f} min left")
        limit = ("--minutes", f"{max(1.0, left - RESIDENT_MINUTES):.1f}") if part.limited else ()
        failed += not _succeeds(part, (*part.arguments, *limit), out, log)
    log(f"{len(parts) - failed} of {len(parts)} parts done in {(time.monotonic() - started) / 60:.0f} min: {out}")
    return failed


def _succeeds(part: Part, arguments: tuple[str, ...], out: Path, log: Callable[[str], None]) -> bool:
    command = f"python -m {' '.join(arguments)}"
    call = [sys.executable, "-m", *arguments]
    printed = subprocess.PIPE if part.page is not None else None
    done = subprocess.run(call, cwd=ROOT, text=True, stdout=printed, check=False)
    if done.returncode:
        log(f"{part.title}: failed with exit code {done.returncode}: {command}")
        return False
    if part.page is not None:
        origin = f"Written by `{command}`, part of `make bench`."
        text = f"# {part.title}\n\n{machine_line(describe())}.\n\n{origin}\n\n```text\n{done.stdout.strip()}\n```\n"
        (out / part.page).write_text(text, encoding="utf-8")
    return True
