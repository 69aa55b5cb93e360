"""Progress: a bar on a terminal, otherwise lines, nothing when quiet, and no bar during measurements."""

from __future__ import annotations

import io
import threading
import time

from rich.console import Console

from lowtide.cli._progress import ProgressReporter


def wait_for_threads(expected: int) -> int:
    """Wait up to 5 s for the number of threads to be `expected`. Return the number of threads."""
    end = time.monotonic() + 5
    while threading.active_count() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return threading.active_count()


def report(*, terminal: bool, quiet: bool = False) -> tuple[str, list[int]]:
    """Return the output, and the number of threads before, in a phase, in a measurement and after."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100, color_system=None)
    threads = [threading.active_count()]
    with ProgressReporter(quiet=quiet, console=console) as progress:
        progress.start_phase("building", total=3)
        progress.completed(1)
        threads.append(threading.active_count())
        with progress.measurement("measuring [one] step"):
            threads.append(wait_for_threads(threads[0]))
        progress.start_phase("planning")
        progress.message("nearly done")
    threads.append(wait_for_threads(threads[0]))
    return output.getvalue(), threads


def test_lines_without_a_terminal() -> None:
    text, threads = report(terminal=False)
    assert text.splitlines() == ["building", "  1 of 3", "measuring [one] step", "planning", "  nearly done"]
    assert len(set(threads)) == 1


def test_bar_on_a_terminal_stops_during_measurements() -> None:
    text, (before, in_phase, in_measurement, after) = report(terminal=True)
    assert "━" in text
    assert "measuring [one] step" in text
    assert "planning: nearly done" in text
    assert in_phase == before + 1
    assert in_measurement == after == before


def test_no_output_when_quiet() -> None:
    for terminal in (False, True):
        text, threads = report(terminal=terminal, quiet=True)
        assert text == ""
        assert len(set(threads)) == 1
