"""Plain arrays leave no graphs behind, so here nothing is collected after every test as it is elsewhere."""

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
