"""Records of the disk queue: one stored value, and one prefetch of it.

Only the disk queue changes them, with its lock held.
"""

from __future__ import annotations

import enum

import torch

from ._base import Entry
from ._geometry import Geometry
from ._spill_file import Written


class State(enum.Enum):
    """Progress of one prefetch."""

    QUEUED = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()
    TAKEN = enum.auto()  # by a fetch or a drop


class Read:
    """One prefetch: a value read from disk before it is fetched."""

    __slots__ = ("abandoned", "buffer", "state")

    def __init__(self) -> None:
        self.state = State.QUEUED
        self.buffer: torch.Tensor | None = None
        self.abandoned = False


class DiskEntry(Entry):
    """A value in memory (`tensor`), on disk (`written`), or lost because it was changed in memory (`damage`)."""

    __slots__ = ("damage", "in_flight_bytes", "read", "readers", "writing", "written")

    def __init__(self, name: str, geometry: Geometry, tensor: torch.Tensor) -> None:
        super().__init__(name, geometry, tensor)
        self.damage: str | None = None
        self.in_flight_bytes = 0  # 0 also for a value larger than the limit
        self.writing = False
        self.written: Written | None = None
        self.read: Read | None = None
        self.readers = 0
