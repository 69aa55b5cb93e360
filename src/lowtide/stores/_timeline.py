"""Timeline of writes, reads and waits of a store, to show how transfers overlap with compute.

Off by default. The last `LIMIT` spans are kept, in the order in which they ended. Recording takes no lock, so
spans can be added and read from any thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

SpanKind = Literal["write", "read", "wait for write", "wait for read"]

LIMIT = 100_000


@dataclass(frozen=True, slots=True)
class Span:
    """One write, read or wait."""

    kind: SpanKind
    """A write runs in a background thread. A read runs there if prefetched, else in the thread of the caller.
    A wait is the time of a caller; it overlaps the write or read that the caller waits for."""
    start_seconds: float
    """Start by `time.perf_counter`, like `end_seconds`."""
    end_seconds: float
    nbytes: int
    """Bytes written, read or waited for."""
    name: str
    """Name given to `put`. "" if the span is not about a single value."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_seconds - self.start_seconds


class Timeline:
    """Recorded spans. Records nothing unless `enabled`."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._spans: deque[Span] = deque(maxlen=LIMIT)

    def add(self, kind: SpanKind, start_seconds: float, nbytes: int, name: str = "") -> None:
        """Record a span from `start_seconds` to now."""
        if self._enabled:
            self._spans.append(Span(kind, start_seconds, time.perf_counter(), nbytes, name))

    @contextmanager
    def span(self, kind: SpanKind, nbytes: int, name: str = "") -> Iterator[None]:
        """Record a span for the `with` block, also if the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, start, nbytes, name)

    def spans(self) -> tuple[Span, ...]:
        """Return the spans recorded so far."""
        while True:
            try:
                return tuple(self._spans)
            except RuntimeError:  # another thread added a span during the copy
                continue
