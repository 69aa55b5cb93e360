"""Output of commands: text on the terminal, JSON, HTML and plots."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from .._errors import BudgetError, MissingPackageError
from ._failures import Failure
from ._options import Outputs

_PIPE_WIDTH = 120
"""Characters per line if stdout is not a terminal."""


def check_plot_package(outputs: Outputs) -> None:
    """Raise `MissingPackageError` before the work starts if a plot is requested without matplotlib."""
    if outputs.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib", "a plot", extra="plots")


def show(outputs: Outputs, *views: Any) -> None:
    """Print `views` to stdout, unless stdout is reserved for JSON."""
    if outputs.json == "-":
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    for view in views:
        console.print(view, highlight=False)


def write_json(outputs: Outputs, text: str) -> None:
    """Write JSON to the requested file or to stdout."""
    if outputs.json == "-":
        click.echo(text)
    elif outputs.json is not None:
        write_file(outputs.json, lambda path: Path(path).write_text(text + "\n", encoding="utf-8"))


def write_file(path: str, write: Callable[[str], Any]) -> None:
    """Call `write(path)`. Raise `Failure` if the file cannot be written."""
    try:
        write(path)
    except OSError as error:
        raise Failure(f"{path!r} cannot be written: {error.strerror or error}") from error


def budget_error_json(error: BudgetError) -> str:
    """Return a budget that cannot be met as JSON."""
    return json.dumps(
        {
            "format": "lowtide refusal",
            "fits": False,
            "budget_bytes": error.budget_bytes,
            "smallest_bytes": error.smallest_bytes,
            "at_least_bytes": error.at_least_bytes,
            "message": str(error),
        }
    )
