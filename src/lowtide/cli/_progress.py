"""Progress of a command on stderr: a bar on a terminal, otherwise plain lines, nothing with --quiet."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class ProgressReporter:
    """Reports the phases of a command, one after another."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._title = ""
        self._total: int | None = None
        if not quiet and self.console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self.console, transient=True)

    def start_phase(self, title: str, total: int | None = None) -> None:
        """Start a phase of `total` parts, or of an unknown number."""
        self._title, self._total = title, total
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(title, total=total)
        else:
            self._print(title)

    @contextlib.contextmanager
    def measurement(self, title: str) -> Iterator[None]:
        """Print a line and stop the bar: the thread of the bar would disturb time measurements."""
        if self._bar is not None:
            self._bar.stop()
        self._print(title)
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.start()

    def message(self, text: str) -> None:
        """Show a message about the current phase."""
        if self._bar is None:
            self._print(f"  {text}")
        elif self._task is not None:
            self._bar.update(self._task, description=f"{self._title}: {text}")

    def completed(self, parts: int) -> None:
        """Show the number of completed parts of the current phase."""
        if self._bar is None:
            self._print(f"  {parts} of {self._total}")
        elif self._task is not None:
            self._bar.update(self._task, completed=parts)

    def _print(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> ProgressReporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextlib.contextmanager
def report_progress(*, quiet: bool, verbosity: int) -> Iterator[ProgressReporter]:
    """Yield a reporter. Show the log of lowtide too: info messages with `verbosity` 1, debug messages with 2."""
    progress = ProgressReporter(quiet=quiet)
    logger = logging.getLogger("lowtide")
    level_before = logger.level
    handler: logging.Handler
    if progress.console.is_terminal:  # RichHandler prints above the bar
        handler = RichHandler(console=progress.console, show_path=False, show_time=False)
    else:
        handler = logging.StreamHandler()
    if verbosity:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if verbosity > 1 else logging.INFO)
    try:
        with progress:
            yield progress
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level_before)
