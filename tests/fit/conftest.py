"""Budgets and profiles count every tensor of the process: none of another test may die in the midst of one."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def no_garbage_of_others() -> None:
    gc.collect()
