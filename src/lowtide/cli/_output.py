"""Answers as they leave a command: on the terminal, as JSON, as a page or a picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from .._errors import BudgetError, MissingPackageError
from ._failures import Failure
from ._options import Outputs

_WIDTH = 120


def check_can_draw(outputs: Outputs) -> None:
    """Say that a package is missing before the work, not after it."""
    if outputs.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("matplotlib", "a picture", extra="plots")


def show(outputs: Outputs, *views: Any) -> None:
    """Print for people, unless stdout is for the JSON alone."""
    if outputs.json == "-":
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)  # a file or a pipe has no width to keep to
    for view in views:
        console.print(view, highlight=False)


def write_json(outputs: Outputs, text: str) -> None:
    """To the file that was asked for, or to stdout."""
    if outputs.json == "-":
        click.echo(text)
    elif outputs.json is not None:
        save(outputs.json, lambda path: Path(path).write_text(text + "\n", encoding="utf-8"))


def save(path: str, write: Any) -> None:
    """Have `write` make the file, and say in a sentence if it cannot."""
    try:
        write(path)
    except OSError as error:
        raise Failure(f"{path!r} cannot be written: {error.strerror or error}") from error


def refusal(error: BudgetError) -> str:
    """A budget that cannot be met, as JSON."""
    return json.dumps(
        {
            "format": "lowtide refusal",
            "fits": False,
            "budget_bytes": error.budget_bytes,
            "smallest_bytes": error.smallest_bytes,
            "message": str(error),
        }
    )
