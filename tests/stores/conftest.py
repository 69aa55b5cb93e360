"""Fixtures: a store of every tier, and a small disk."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.stores import Store

from .tiers import TIERS


@pytest.fixture(params=TIERS, ids=lambda name: name.replace(", ", "-").replace(" ", "-"))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with TIERS[request.param](tmp_path) as store:
        yield store


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from small_file_system(tmp_path / "small", "4m")


def small_file_system(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir()
    mount(directory, f"size={size}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def mount(directory: Path, options: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "lowtide-test", str(directory)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
