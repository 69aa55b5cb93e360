"""All benchmarks one after the other, each in a process of its own: what `make bench` does. No torch.

A part that fails is said and does not keep the others from running. What only prints gets a page of its own, with
machine, versions and date, beside the results.
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
"""Left of the whole for resident memory, pages and pictures, which come after all models."""


@dataclass(frozen=True)
class Part:
    """One command."""

    title: str
    arguments: tuple[str, ...]
    page: str | None = None
    """Where what it prints is kept; None: it writes its own pages."""
    expected_minutes: float = 0.0
    """On one core of a machine on which a plain step of the standard models takes about a second."""
    takes_the_rest: bool = False
    """It is told with `--minutes` how long it may take."""


def parts_of(out: Path, quick: bool) -> tuple[Part, ...]:
    """The short ones first: the last one gets the time that is left."""
    where = ("--out", str(out), *(("--quick",) if quick else ()))
    overhead = ("--rounds", "2", "--gpt2-rounds", "0") if quick else ("--rounds", "25", "--gpt2-rounds", "6")
    schedules = ("--rounds", "1" if quick else "3", "--skip-slow")  # the peers take minutes for the others
    return (
        Part("What recording costs", ("benchmarks.overhead", *overhead), "overhead.md", 4),
        Part("Schedules for chains beside their peers", ("benchmarks.schedules", *schedules), "schedules.md", 2),
        Part("How costs grow", ("benchmarks", "scaling", *where), None, 6),
        Part("lowtide beside its peers", ("benchmarks", "run", *where), None, 45, takes_the_rest=not quick),
    )


def run_parts(parts: tuple[Part, ...], out: Path, minutes: float, say: Callable[[str], None]) -> int:
    """All of them; the number of those that failed."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    expected = ", ".join(f"{part.title.lower()} ({part.expected_minutes:g} min)" for part in parts)
    say(f"{len(parts)} parts: {expected}; to be done in {minutes:g} min")
    failed = 0
    for number, part in enumerate(parts, 1):
        left = minutes - (time.monotonic() - started) / 60
        say(f"[part {number} of {len(parts)}] {part.title}; {left:.0f} min left")
        more = ("--minutes", f"{max(1.0, left - RESIDENT_MINUTES):.1f}") if part.takes_the_rest else ()
        failed += not _done(part, (*part.arguments, *more), out, say)
    say(f"{len(parts) - failed} of {len(parts)} parts done in {(time.monotonic() - started) / 60:.0f} min: {out}")
    return failed


def _done(part: Part, arguments: tuple[str, ...], out: Path, say: Callable[[str], None]) -> bool:
    command = f"python -m {' '.join(arguments)}"
    call = [sys.executable, "-m", *arguments]
    printed = subprocess.PIPE if part.page is not None else None
    done = subprocess.run(call, cwd=ROOT, text=True, stdout=printed, check=False)
    if done.returncode:
        say(f"{part.title}: failed with exit code {done.returncode}: {command}")
        return False
    if part.page is not None:
        where, how = machine_line(describe()), f"Made by `{command}`, which is part of `make bench`."
        text = f"# {part.title}\n\n{where}.\n\n{how}\n\n```text\n{done.stdout.strip()}\n```\n"
        (out / part.page).write_text(text, encoding="utf-8")
    return True
