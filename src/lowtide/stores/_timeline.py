"""When a store wrote and read, and when its callers waited for that: for a picture of what overlaps what.

Only what is asked for is recorded, and of that the last `LIMIT` spans. Recording takes no lock, so it may be done and
read from any thread; spans are in the order in which they ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Kind = Literal["write", "read", "wait for write", "wait for read"]

LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took a while."""

    kind: Kind
    """A "write" or "read" is work, in a background thread or, for a read that nobody had hinted at, in the caller's.
    A "wait" is what it cost a caller: it overlaps the work that is waited for."""
    start_seconds: float
    """By `time.perf_counter`, as is the end."""
    end_seconds: float
    nbytes: int
    """What was written, read, or waited for."""
    name: str
    """The name given to `put`; "" where no single value is meant."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


class Timeline:
    """Spans, if they are wanted."""

    def __init__(self, wanted: bool) -> None:
        self._prefetch_queue = wanted
        self._spans: deque[Span] = deque(maxlen=LIMIT)

    def add(self, kind: Kind, start_seconds: float, nbytes: int, name: str = "") -> None:
        """Note what began at `start_seconds` and ends now."""
        if self._prefetch_queue:
            self._spans.append(Span(kind, start_seconds, time.perf_counter(), nbytes, name))

    @contextmanager
    def span(self, kind: Kind, nbytes: int, name: str = "") -> Iterator[None]:
        """Note how long the block takes, also if it fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, start, nbytes, name)

    def spans(self) -> tuple[Span, ...]:
        """What was noted until now."""
        while True:
            try:
                return tuple(self._spans)
            except RuntimeError:  # another thread added one meanwhile
                continue
