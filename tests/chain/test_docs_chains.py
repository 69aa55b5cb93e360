"""Every code block of docs/reference/chains.md runs and prints the output shown on the page."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import lowtide
from lowtide import chain

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "chains.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_runs_and_prints_the_shown_output():
    blocks = [
        (match[1], match[2], PAGE.read_text()[: match.start()].count("\n") + 2)
        for match in BLOCK.finditer(PAGE.read_text())
    ]
    assert sum(kind == "python" for kind, _, _ in blocks) >= 10
    names: dict = {}
    printed = ""
    for kind, text, line in blocks:
        if kind == "text":
            assert printed == text, f"line {line}"
            continue
        assert kind == "python", f"line {line}: a block that is not run"
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("\n" * (line - 1) + text, str(PAGE), "exec"), names)
        printed = out.getvalue()


@pytest.mark.parametrize("name", chain.__all__)
def test_every_public_name_exists_and_has_a_docstring(name):
    assert getattr(chain, name).__doc__


def test_the_table_of_old_names_lists_existing_names():
    table = PAGE.read_text().split("## Names in other libraries")[1]
    ours = [row.rsplit("|", 2)[1] for row in table.splitlines() if row.startswith("| ") and "original" not in row]
    words = set(re.findall(r"\b(Checkpointer|ActivationStore|Segments|EveryN|Selective|KeepAll|KeepNone)\b", str(ours)))
    assert len(ours) >= 20
    assert all(hasattr(chain, word) or hasattr(lowtide, word) for word in words)
    for method in re.findall(r"`store\.(\w+)", str(ours)):
        assert hasattr(chain.ActivationStore(), method), method
    for method in re.findall(r"`(?:Checkpointer|checkpointer)\.(\w+)", str(ours)):
        assert hasattr(chain.Checkpointer(), method), method
