"""All parts by one command: what they print is kept with where it was measured, and one that fails stops no other."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.suite import Part, parts_of, run_parts


def test_what_a_part_prints_gets_a_page_and_a_failure_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    parts = (
        Part("Nothing of the kind", ("benchmarks", "no-such-command"), "nothing.md"),
        Part("What compare takes", ("benchmarks", "compare", "--help"), "compare.md"),
    )
    assert run_parts(parts, tmp_path, 10, said.append) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["compare.md"]
    page = (tmp_path / "compare.md").read_text()
    assert "What became slower or larger from OLD to NEW" in page
    assert "torch 2" in page
    assert " UTC." in page
    assert "Nothing of the kind: failed with exit code 2: python -m benchmarks no-such-command" in said
    assert said[-1].startswith("1 of 2 parts done")


def test_only_the_last_part_is_told_how_long_it_may_take(tmp_path: Path) -> None:
    assert [part.takes_the_rest for part in parts_of(tmp_path, quick=False)] == [False, False, False, True]
    assert not any(part.takes_the_rest for part in parts_of(tmp_path, quick=True))
