"""`lowtide doctor`: versions, speeds, checks, and no files left."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

import lowtide
from lowtide.cli import _doctor_checks
from lowtide.codecs import CODECS
from lowtide.torch_compat import autograd, storage

Command = Callable[..., Result]


@pytest.fixture(scope="module")
def checkup(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from click.testing import CliRunner

    from lowtide.cli import main

    directory = tmp_path_factory.mktemp("disk")
    start = time.perf_counter()
    result = CliRunner().invoke(main, ["doctor", "--json", "-", "--directory", str(directory)], catch_exceptions=False)
    assert time.perf_counter() - start < 20
    assert result.exit_code == 0
    assert list(directory.iterdir()) == []
    assert "measuring codecs" in result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_versions(checkup: dict[str, Any]) -> None:
    assert checkup["lowtide"] == lowtide.__version__
    assert checkup["python"] == platform.python_version()
    packages = {package["name"]: package for package in checkup["packages"]}
    assert packages["torch"] == {"name": "torch", "version": metadata.version("torch"), "extra": None}
    assert packages["blosc2"]["extra"] == "codecs"
    assert packages["transformers"]["extra"] == "demo"
    assert "pytest" not in packages


def test_missing_package_has_the_pip_command(lowtide_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["torch>=2.9", 'no-such-package>=1; extra == "plots"', 'pytest>=8; extra == "dev"']
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    result = lowtide_command("doctor", "-q")
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("no-such-package")]
    assert line.split() == ["no-such-package", "not", "installed", "pip", "install", '"lowtide[plots]"']
    assert "pytest" not in result.stdout
    assert result.stdout.endswith("all checks passed\n")


def test_every_tier_and_codec_is_measured(checkup: dict[str, Any]) -> None:
    tiers = {tier["name"]: tier for tier in checkup["tiers"]}
    assert {"memory", "disk"} <= set(tiers)
    assert all(tier["out_bytes_per_s"] > 0 and tier["in_bytes_per_s"] > 0 for tier in tiers.values())
    codecs = {codec["name"]: codec for codec in checkup["codecs"]}
    assert list(codecs) == list(CODECS)
    assert all(codec["ratio"] > 1.5 for codec in codecs.values())  # each codec has a suitable sample
    assert checkup["devices"][0]["name"] == "cpu"


def test_all_checks_pass(checkup: dict[str, Any]) -> None:
    assert checkup["well"] is True
    assert [check["works"] for check in checkup["checks"]] == [True, True, True]


def test_missing_private_name_is_reported(lowtide_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "_storage_users = torch._C._storage_Use_Count\ngone = torch._C._no_such.thing_at_all\n"
    assert _doctor_checks.private_names_in(source) == ["torch._C._no_such.thing_at_all", "torch._C._storage_Use_Count"]
    monkeypatch.setattr(_doctor_checks.inspect, "getsource", lambda module: source if module is autograd else "")
    result = lowtide_command("doctor", "-q", "--json", "-")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["well"] is False
    (broken,) = [check for check in document["checks"] if not check["works"]]
    assert broken["words"] == f"missing in torch {torch.__version__}: torch._C._no_such.thing_at_all"


def test_private_names_are_found_in_the_source() -> None:
    import inspect

    names = _doctor_checks.private_names_in(inspect.getsource(autograd) + inspect.getsource(storage))
    assert "torch._C._current_graph_task_id" in names
    assert "torch.Tensor._make_subclass" in names
    assert "torch.Tensor" not in names


def test_missing_directory_is_rejected(lowtide_command: Command, tmp_path: Path) -> None:
    result = lowtide_command("doctor", "--directory", str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
