"""One thread, as everywhere; but no garbage collection after each test, of which there are many small ones."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
