"""Collect garbage before each test: budgets and profiles count all tensors of the process."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def no_garbage_of_others() -> None:
    gc.collect()
