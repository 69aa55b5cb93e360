"""What every test of the engine starts from."""

from __future__ import annotations

import pytest

from tests.runtimes import pool


@pytest.fixture(autouse=True)
def empty_pool() -> None:
    """Values that other tests leave alive must not be evicted: some programs make graphs that torch never frees."""
    pool().clear()
