"""What every test starts from."""

from __future__ import annotations

import gc
import sys

import pytest


def pytest_collection_finish() -> None:
    """Have the garbage collector, which is called often here, leave alone all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Kernels then reduce in one order, and two workers share two cores."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
