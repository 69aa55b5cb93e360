"""Every block of code in README and docs runs, and prints what the page says it prints.

Blocks of one page share their names, in order. A `text` block is what the Python block before it printed.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!http)([^)#]+)(?:#([^)]+))?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_blocks_run_and_print_what_they_say(page: Path) -> None:
    text = page.read_text()
    names: dict[str, Any] = {}
    printed = None
    for match in BLOCK.finditer(text):
        kind, body, line = match[1], match[2], text[: match.start()].count("\n") + 2
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * (line - 1) + body, str(page), "exec"), names)
            printed = out.getvalue()
        elif kind == "text":
            assert printed == body, f"{page.name}, line {line}"
        else:
            assert kind in ("", "sh"), f"{page.name}, line {line}: a block that nobody runs"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(BLOCK.sub("", page.read_text())):
        path = (page.parent / target).resolve()
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{target}#{anchor}"


def test_the_map_of_rooms_is_true() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"\b(\w+\.py)\b", text):
        assert list((ROOT / "src").rglob(name)), name
    for path in (ROOT / "src" / "lowtide" / "engine").glob("*.py"):
        assert path.name in text or path.name == "__init__.py", f"{path.name} is not on the map"
