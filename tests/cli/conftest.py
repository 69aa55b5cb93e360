"""Fixtures: a directory with user modules, and a function that runs a command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lowtide.cli import main

OWN_MODELS = """
import torch
from torch import nn

def build(batch_size=32):
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
    return net, torch.randn(batch_size, 64)

def loss(out):
    return out.square().mean()

def fixed():
    return build()

def sequences(length=16, batch_size=4):
    return build()[0], torch.randn(batch_size, length, 64)

def returns_dict():
    return {"model": build()[0]}

def returns_wrong_order():
    return build()[::-1]

def returns_three():
    return (*build(), 3)

def raises():
    raise ValueError("no data\\nhere")

def exits():
    raise SystemExit("usage: own_models.py DATA")

def wrong_shape():
    return build()[0], torch.randn(3, 7)

not_a_function = 3
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    (tmp_path / "syntax_error.py").write_text("def build(:\n")
    (tmp_path / "missing_import.py").write_text("import no_such_package\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("own_models", "syntax_error", "missing_import"):
        sys.modules.pop(name, None)


@pytest.fixture
def lowtide_command() -> Callable[..., Result]:
    """Return a function that runs `lowtide ARGS` in this process. Exceptions propagate to the test."""

    def run(*args: str) -> Result:
        return CliRunner().invoke(main, [*args], catch_exceptions=False)

    return run
