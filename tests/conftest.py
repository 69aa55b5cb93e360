"""Fixtures of all tests."""

from __future__ import annotations

import gc
import sys

import pytest


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which tests call often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Use one thread: kernels reduce in a fixed order, and two workers share two cores."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
