"""What every test of the engine starts from."""

from __future__ import annotations

import pytest

from lowtide.engine.room import POOL


@pytest.fixture(autouse=True)
def alone_in_the_pool() -> None:
    """What other tests leave alive is not this one's: some programs make graphs that torch itself never frees."""
    for value in POOL.all():
        POOL._leave(value)
    POOL._members.clear()
