"""Results that are a list of rows: JSON and Markdown files of `held`, `smallest_budget` and `planners`. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

RowT = TypeVar("RowT")
Page = Callable[[list[RowT], dict[str, Any]], str]
"""Returns the page for rows and a machine."""


def write_rows(file: Path, rows: Sequence[Any], machine: dict[str, Any], page: Page[Any]) -> None:
    """Write the JSON file, and the page beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "rows": [asdict(row) for row in rows]}
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    file.with_suffix(".md").write_text(page(list(rows), machine), encoding="utf-8")


def read_rows(file: Path, kind: type[RowT]) -> tuple[list[RowT], dict[str, Any]]:
    """Return rows and machine of a JSON file; fields that `kind` does not have are skipped."""
    document = json.loads(file.read_text(encoding="utf-8"))
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    rows = [kind(**{name: value for name, value in row.items() if name in names}) for row in document["rows"]]
    return rows, document["machine"]


def rewrite_page(file: Path, kind: type[RowT], page: Page[RowT]) -> None:
    """Write the page of a JSON file again."""
    file.with_suffix(".md").write_text(page(*read_rows(file, kind)), encoding="utf-8")
