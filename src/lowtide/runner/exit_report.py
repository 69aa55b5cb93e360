"""The summary on stderr and the HTML report, written when the script exits.

Forked child processes report nothing. torch is imported only if the script imports torch.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .._errors import BudgetError
from .._units import format_budget, format_bytes
from .import_hook import call_after_import
from .settings import Settings

if TYPE_CHECKING:
    from .step_finder import StepFinder

_NO_TORCH = "the script did not import torch, so there was nothing to train."


class ExitReport:
    """Installs the step finder when torch is imported, and reports at exit.

    `html_path` is the file for the HTML report, None for no report. `quiet` disables the summary.
    """

    def __init__(self, settings: Settings, html_path: Path | None, quiet: bool) -> None:
        self._settings = settings
        self._html_path = html_path
        self._quiet = quiet
        self._pid = os.getpid()
        self._rank = os.environ.get("RANK")  # set by torchrun
        self._finder: StepFinder | None = None

    def install(self) -> None:
        """Register the import hook and the exit function. Call before the script runs."""
        atexit.register(self._report)
        call_after_import("torch", self._install_finder)

    def _install_finder(self) -> None:
        from .step_finder import StepFinder

        self._finder = StepFinder(self._settings)
        self._finder.install()

    def _report(self) -> None:
        if os.getpid() != self._pid:
            return
        prefix = f"lowtide run, rank {self._rank}" if self._rank is not None else "lowtide run"
        messages = [] if self._quiet else [self._summary()]
        if self._html_path is not None and (problem := self._write_html(self._html_path)) is not None:
            messages.append(f"no report was written to {self._html_path}: {problem}")
        # One write: the lines of several ranks must not mix.
        sys.stderr.write("".join(f"{prefix}: {message}\n" for message in messages))

    def _summary(self) -> str:
        if self._finder is None:
            return _NO_TORCH
        from .summary import summarise

        error = getattr(sys, "last_value", None)
        refused = error if isinstance(error, BudgetError) else None
        summary = summarise(self._finder, stopped=refused is not None)
        return summary if refused is None else f"{self._describe_refusal(refused)}\n{summary}"

    def _describe_refusal(self, refused: BudgetError) -> str:
        if refused.budget_bytes != self._settings.budget_bytes:
            return (
                f"the script ended because a budget that it set itself, {format_bytes(refused.budget_bytes)}, could "
                "not be met."
            )
        least = refused.smallest_bytes or refused.at_least_bytes
        increase = "increase --budget" if least is None else f"increase --budget, at least to {format_budget(least)}"
        store = ", try --store disk" if self._settings.store == "device" else ""
        return (
            f"the script ended because the budget of {format_bytes(refused.budget_bytes)} could not be met: {increase}"
            f"{store}, or use a smaller batch. lowtide plan names a budget that works."
        )

    def _write_html(self, path: Path) -> str | None:
        """Write the HTML report. Return the reason if there is no report to write."""
        if self._finder is None:
            return _NO_TORCH
        from .html_report import write_html_report

        if self._rank not in (None, "0"):
            path = path.with_stem(f"{path.stem}.rank{self._rank}")
        return write_html_report(self._finder, path)
