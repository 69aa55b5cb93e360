"""What a long command is at: a bar on a terminal, plain lines elsewhere, on stderr; nothing when quiet."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Teller:
    """Tells one phase after another. `phase` begins one, `say` adds to it, `done` moves its bar."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._words = ""
        self._total: int | None = None
        if not quiet and self.console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self.console, transient=True)

    def phase(self, words: str, total: int | None = None) -> None:
        """A new phase of `total` parts, or of nobody knows how many."""
        self._words, self._total = words, total
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(words, total=total)
        else:
            self._line(words)

    @contextlib.contextmanager
    def still(self, words: str) -> Iterator[None]:
        """A phase in which times are measured: a line, and no bar whose thread would take some of them."""
        if self._bar is not None:
            self._bar.stop()
        self._line(words)
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.start()

    def say(self, words: str) -> None:
        """Something about the phase that has begun."""
        if self._bar is None:
            self._line(f"  {words}")
        elif self._task is not None:
            self._bar.update(self._task, description=f"{self._words}: {words}")

    def done(self, parts: int) -> None:
        """So many parts of the phase are done."""
        if self._bar is None:
            self._line(f"  {parts} of {self._total}")
        elif self._task is not None:
            self._bar.update(self._task, completed=parts)

    def _line(self, words: str) -> None:
        if not self.quiet:
            self.console.print(words, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Teller:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextlib.contextmanager
def telling(*, quiet: bool, verbosity: int) -> Iterator[Teller]:
    """A teller, and the log of lowtide beside it: from `verbosity` 1 on what happens, from 2 on every detail."""
    teller = Teller(quiet=quiet)
    logger = logging.getLogger("lowtide")
    before = logger.level
    handler: logging.Handler
    if teller.console.is_terminal:  # above the bar, not through it
        handler = RichHandler(console=teller.console, show_path=False, show_time=False)
    else:
        handler = logging.StreamHandler()
    if verbosity:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if verbosity > 1 else logging.INFO)
    try:
        with teller:
            yield teller
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
