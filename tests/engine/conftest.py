"""Fixtures of the engine tests."""

from __future__ import annotations

import pytest

from tests.runtimes import pool


@pytest.fixture(autouse=True)
def empty_pool() -> None:
    """Remove values of earlier tests from the pool. Some programs create graphs that torch never frees."""
    pool().clear()
