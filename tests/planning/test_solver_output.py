"""Output of the solver goes to standard error."""

import ctypes
import os
import sys

import pytest

from lowtide.planning.solver_output import to_standard_error


def test_only_output_inside_the_block_is_redirected(capfd: pytest.CaptureFixture[str]) -> None:
    c = ctypes.CDLL(None)
    c.printf(b"before;")
    with to_standard_error():
        c.printf(b"a solver;")
        os.write(1, b"its thread;")
    c.printf(b"after;")
    c.fflush(None)
    sys.stdout.flush()
    out, err = capfd.readouterr()
    assert out == "before;after;"
    assert sorted(err.split(";")) == ["", "a solver", "its thread"]


def test_a_process_without_standard_output_is_not_redirected(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(descriptor: int) -> int:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(os, "dup", closed)
    with to_standard_error():
        done = True
    assert done
