"""Progress of a long sweep on standard error: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import Any

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Context manager that counts forward steps and shows the count if `enabled`."""

    def __init__(self, enabled: bool, total: int | None) -> None:
        self.done = 0
        self._total = total
        self._enabled = enabled
        self._last = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("reversing", total=self._total)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._enabled:
            self._line("stopped" if exception[0] else "done")

    def expect(self, total: int) -> None:
        """Set the total number of forward steps."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def step(self) -> None:
        """Count one forward step."""
        self.done += 1
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.advance(self._task)
        elif time.perf_counter() - self._last >= SECONDS_BETWEEN_LINES:
            self._line("running")

    def _line(self, word: str) -> None:
        self._last = time.perf_counter()
        of = f" of {self._total:,} ({100 * self.done / self._total:.0f} %)" if self._total else ""
        print(f"lowtide: {word}, {self.done:,}{of} forward steps", file=sys.stderr, flush=True)
