"""Fixtures of the codec tests: one torch thread, and no garbage collection after each of the many small tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
