"""One thread for every test: kernels then reduce in one order, and two workers share two cores."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
