"""A directory with a module of models, as a user of the commands has one."""

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

def gives_a_dict():
    return {"model": build()[0]}

def gives_the_wrong_order():
    return build()[::-1]

def gives_three():
    return (*build(), 3)

def raises():
    raise ValueError("no data\\nhere")

def leaves():
    raise SystemExit("usage: own_models.py DATA")

def wrong_shape():
    return build()[0], torch.randn(3, 7)

not_a_function = 3
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    (tmp_path / "own_broken.py").write_text("def build(:\n")
    (tmp_path / "own_needy.py").write_text("import a_package_that_is_nowhere\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("own_models", "own_broken", "own_needy"):
        sys.modules.pop(name, None)


@pytest.fixture
def lowtide_command() -> Callable[..., Result]:
    """`lowtide_command("plan", "--preset", ...)`: run in this process; an exception that is no exit is the test's."""

    def run(*words: str) -> Result:
        return CliRunner().invoke(main, [*words], catch_exceptions=False)

    return run
