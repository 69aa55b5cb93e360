"""Progress: a bar on a terminal, lines elsewhere, nothing when quiet; and no bar while times are measured."""

from __future__ import annotations

import io
import threading
import time

from rich.console import Console

from lowtide.cli._progress import Teller


def settled(expected: int) -> int:
    """How many threads there are, once one that has been told to end had the time to."""
    end = time.monotonic() + 5
    while threading.active_count() != expected and time.monotonic() < end:
        time.sleep(0.01)
    return threading.active_count()


def told(*, terminal: bool, quiet: bool = False) -> tuple[str, list[int]]:
    """What a teller writes, and how many threads there are before, in a phase, and while it is still."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100, color_system=None)
    threads = [threading.active_count()]
    with Teller(quiet=quiet, console=console) as teller:
        teller.phase("looking", total=3)
        teller.done(1)
        threads.append(threading.active_count())
        with teller.still("measuring [one] step"):
            threads.append(settled(threads[0]))
        teller.phase("planning")
        teller.say("nearly there")
    threads.append(settled(threads[0]))
    return written.getvalue(), threads


def test_lines_where_there_is_no_terminal() -> None:
    text, threads = told(terminal=False)
    assert text.splitlines() == ["looking", "  1 of 3", "measuring [one] step", "planning", "  nearly there"]
    assert len(set(threads)) == 1


def test_a_bar_on_a_terminal_that_stands_still_for_measurements() -> None:
    text, (before, moving, still, after) = told(terminal=True)
    assert "━" in text
    assert "measuring [one] step" in text
    assert "planning: nearly there" in text
    assert moving == before + 1
    assert still == after == before


def test_nothing_when_quiet() -> None:
    for terminal in (False, True):
        text, threads = told(terminal=terminal, quiet=True)
        assert text == ""
        assert len(set(threads)) == 1
