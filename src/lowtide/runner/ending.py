"""What is said and written when the program has ended, whichever way.

Only in the process that was started: those that it forks say nothing. torch is imported when the program imports it,
and not at all if it does not.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .._errors import BudgetError
from .._units import format_bytes
from .import_hook import when_imported
from .settings import Settings

if TYPE_CHECKING:
    from .step_finder import StepFinder

_NO_TORCH = "the program did not import torch, so it trained nothing here."


class Ending:
    """Waits for the program's end, and knows the finder of its steps."""

    def __init__(self, settings: Settings, page: Path | None, quiet: bool) -> None:
        self._settings = settings
        self._page = page
        self._quiet = quiet
        self._process = os.getpid()
        self._rank = os.environ.get("RANK")  # as torchrun says it
        self._finder: StepFinder | None = None

    def prepare(self) -> None:
        """Before the program runs."""
        atexit.register(self._tell)
        when_imported("torch", self._find_steps)

    def _find_steps(self) -> None:
        from .step_finder import StepFinder

        self._finder = StepFinder(self._settings)
        self._finder.install()

    def _tell(self) -> None:
        if os.getpid() != self._process:
            return
        who = f"lowtide run, rank {self._rank}" if self._rank is not None else "lowtide run"
        said = [] if self._quiet else [self._summary()]
        if self._page is not None and (trouble := self._write_page(self._page)) is not None:
            said.append(f"no page was written to {self._page}: {trouble}")
        sys.stderr.write("".join(f"{who}: {text}\n" for text in said))  # at once: other ranks write too

    def _summary(self) -> str:
        if self._finder is None:
            return _NO_TORCH
        from .summary import summarise

        if isinstance(getattr(sys, "last_value", None), BudgetError):
            budget = format_bytes(self._settings.budget_bytes)
            return (
                f"the budget of {budget} could not be held, which has ended the program: "
                "give it more with --budget, try --store disk, or make the batch smaller."
            )
        return summarise(self._finder)

    def _write_page(self, path: Path) -> str | None:
        if self._finder is None:
            return _NO_TORCH
        from .page import write_page

        if self._rank not in (None, "0"):
            path = path.with_stem(f"{path.stem}.rank{self._rank}")
        return write_page(self._finder, path)
