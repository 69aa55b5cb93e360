"""Run the code of README and docs, compare the printed output, and check links, file names and generated pages.

Blocks of one page share their names, in order. A `text` block is the output of the Python block before it. A block
below `<!-- needs package -->` runs only if that package is installed. A block below `<!-- numbers vary -->` has the
labels of the output (the first word of each line); its numbers are those of one run.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import io
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
BLOCK = re.compile(r"^(?:<!-- (?:needs (\w+)|(numbers vary)) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
NAMED_FILE = re.compile(r"`((?:\w+/)+(?:[\w-]+\.(?:py|md|json))?)`")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(page: Path, packages: tuple[str, ...] = ()) -> None:
    """Run the blocks of a page, including those that need one of these packages."""
    gc.collect()  # a budget counts tensors of other pages too
    text = page.read_text()
    names: dict[str, Any] = {}
    printed = None
    for match in BLOCK.finditer(text):
        needs, varies, language, body = match.groups()
        line = text[: match.start(4)].count("\n") + 1
        if needs and needs not in packages:
            assert language == "python", f"{name_of(page)}, line {line}: only a Python block can need a package"
            printed = None
        elif language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * (line - 1) + body, str(page), "exec"), names)
            printed = out.getvalue()
        elif language == "text" and varies:
            assert printed is not None
            assert labels(printed) == labels(body), f"{name_of(page)}, line {line}: another run printed\n{printed}"
        elif language == "text":
            assert printed == body, f"{name_of(page)}, line {line}"
        else:
            assert language in ("", "sh"), f"{name_of(page)}, line {line}: a block that is not run"


def labels(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_run_and_print_the_shown_output(page: Path) -> None:
    run(page)


@pytest.mark.parametrize(
    ("page", "package"),
    [(page, needs) for page in PAGES for needs in sorted({m[1] for m in BLOCK.finditer(page.read_text()) if m[1]})],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_blocks_that_need_a_package_run_if_it_is_installed(page: Path, package: str) -> None:
    pytest.importorskip(package)
    run(page, (package,))


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_have_targets(page: Path) -> None:
    for target, anchor in LINK.findall(BLOCK.sub("", page.read_text())):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    for path, name in NAMED_TEST.findall(page.read_text()):
        assert (ROOT / path).is_file(), path
        functions = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
        assert not name or (name.startswith("test_") and name in functions), f"{path}::{name}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for path in NAMED_FILE.findall(BLOCK.sub("", page.read_text())):
        assert (ROOT / path).exists() or (ROOT / "src" / "lowtide" / path).exists(), path


def test_every_faq_entry_names_its_test() -> None:
    questions = (ROOT / "docs" / "explanation" / "faq.md").read_text().split("\n### ")[1:]
    assert len(questions) >= 22
    for entry in questions:
        assert any(name for _, name in NAMED_TEST.findall(entry)), entry.splitlines()[0]


def test_the_costs_of_budgets_are_those_of_the_benchmark() -> None:
    """docs/how-to/choosing.md has the least and the greatest step time of all models, for each share."""
    models = json.loads((ROOT / "benchmarks" / "results" / "online.json").read_text())["models"]
    times: dict[float, list[float]] = {}
    for row in (row for model in models for row in model["rows"] if row["variant"] == "lowtide"):
        times.setdefault(row["share"], []).append(row["times"])
    written = re.findall(
        r"^\| (\d+) % \| ([\d.]+) to ([\d.]+) \|$", (ROOT / "docs" / "how-to" / "choosing.md").read_text(), re.MULTILINE
    )
    assert written == [(f"{100 * s:.0f}", f"{min(t):.2f}", f"{max(t):.2f}") for s, t in sorted(times.items())[::-1]]


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text()) if target}
    assert {page for page in PAGES[1:] if page != index} <= linked


def test_the_list_of_public_names_is_that_of_the_code() -> None:
    found = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert found is not None
    assert found.loader is not None
    make_api: ModuleType = importlib.util.module_from_spec(found)
    found.loader.exec_module(make_api)
    same = make_api.PAGE.read_text() == make_api.page()
    assert same, "docs/reference/api.md is out of date: run python docs/make_api.py"


def test_the_map_of_packages_is_true() -> None:
    """CONTRIBUTING.md names each package, and each module outside of packages, once and with a description."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Packages")[1]
    match = BLOCK.search(section)
    assert match is not None
    lines = match[4].splitlines()
    source = ROOT / lines[0]
    named: list[Path] = []
    folder = {0: source}  # by indentation
    for line in lines[1:]:
        found = re.fullmatch(r"( +)(\S+) {2,}(\S.*)", line)
        assert found is not None, line
        depth = len(found[1])
        path = folder[depth - 2] / found[2]
        assert path.is_dir() == found[2].endswith("/"), f"{path} does not exist"
        folder[depth] = path
        named.append(path)
    packages = {path.parent for path in source.rglob("__init__.py")} - {source}
    assert sorted(named) == sorted(packages | set(source.glob("*.py")))
