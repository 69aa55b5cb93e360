"""The suite: printed output is saved with the machine, and a failing part does not stop the others."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.suite import Part, run_parts, suite_parts


def test_printed_output_is_saved_and_failures_are_reported(tmp_path: Path) -> None:
    lines: list[str] = []
    parts = (
        Part("A missing command", ("benchmarks", "no-such-command"), "nothing.md"),
        Part("Options of compare", ("benchmarks", "compare", "--help"), "compare.md"),
    )
    assert run_parts(parts, tmp_path, 10, lines.append) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["compare.md"]
    page = (tmp_path / "compare.md").read_text()
    assert "Compare two results.json files" in page
    assert "torch 2" in page
    assert " UTC." in page
    assert "A missing command: failed with exit code 2: python -m benchmarks no-such-command" in lines
    assert lines[-1].startswith("1 of 2 parts done")


def test_only_the_last_part_gets_a_time_limit(tmp_path: Path) -> None:
    assert [part.limited for part in suite_parts(tmp_path, quick=False)] == [False, False, False, True]
    assert not any(part.limited for part in suite_parts(tmp_path, quick=True))
