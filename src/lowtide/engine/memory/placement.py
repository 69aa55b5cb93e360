"""Where the content of a value is while it is not in memory: one put/get interface for stores and codecs.

`put` gives a `Placement`, or None if the content cannot be put there. `Placement.get` returns the content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...codecs import CODECS, Chooser, Encoded, decode
from ...codecs._base import CHUNK_ELEMENTS
from ...stores import Store, Ticket
from ..values.value import Tensor


class Placement(Protocol):
    """Content in a store, or compressed."""

    @property
    def is_compressed(self) -> bool:
        """Whether the content is in memory, compressed."""

    @property
    def has_failed(self) -> bool:
        """Whether the content could not be written, so that it is still in memory."""

    @property
    def is_usable(self) -> bool:
        """Whether `get` works: the store is open."""

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""

    def get(self) -> Tensor:
        """Return the content as one row of elements."""

    def bytes_to_get(self) -> int:
        """Return the bytes that `get` allocates, with workspace."""

    def prefetch(self) -> None:
        """Start to read the content. A hint."""

    def is_being_written(self) -> bool:
        """Return whether the put memory is still in use."""

    def wait_until_written(self) -> None:
        """Wait until the put memory is free, or the write has failed."""


class StorePlacement:
    """Content in a store."""

    is_compressed = False

    def __init__(self, store: Store, ticket: Ticket) -> None:
        self.store = store
        self.ticket = ticket

    @property
    def has_failed(self) -> bool:
        """Whether the content could not be written, so that it is still in memory."""
        return self.ticket.fell_back

    @property
    def is_usable(self) -> bool:
        """Whether the store is open."""
        return not self.store.closed

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return self.ticket.nbytes

    def get(self) -> Tensor:
        """Read the content, which also stays in the store."""
        return self.store.fetch(self.ticket)

    def bytes_to_get(self) -> int:
        """Return the bytes that `get` allocates: 0 once the content is prefetched."""
        return self.store.bytes_to_fetch(self.ticket)

    def prefetch(self) -> None:
        """Start to read the content."""
        self.store.prefetch(self.ticket)

    def is_being_written(self) -> bool:
        """Return whether the store still holds the put memory."""
        return not self.store.closed and self.store.is_resident(self.ticket)

    def wait_until_written(self) -> None:
        """Wait until the put memory is free, or the write has failed."""
        while not self.ticket.fell_back and self.store.is_resident(self.ticket):
            if not self.store.drain(self.ticket.nbytes):
                return  # nothing is being written any more


class CompressedPlacement:
    """Content in memory, compressed by a codec."""

    is_compressed = True
    has_failed = False
    is_usable = True

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return self.encoded.geometry.nbytes

    def get(self) -> Tensor:
        """Decompress the content."""
        return decode(self.encoded)

    def bytes_to_get(self) -> int:
        """Return the bytes that `get` allocates, with the codec's workspace."""
        nbytes = self.encoded.geometry.nbytes
        return nbytes + codec_workspace(nbytes)

    def prefetch(self) -> None:
        """Do nothing: the content is in memory."""

    def is_being_written(self) -> bool:
        """Return False: compression is finished when `put` returns."""
        return False

    def wait_until_written(self) -> None:
        """Return at once."""


def put_in_store(store: Store, row: Tensor, name: str) -> StorePlacement:
    """Start to write `row`, which must not change until it is written."""
    return StorePlacement(store, store.put(row, name))


def put_compressed(codecs: Sequence[str], row: Tensor) -> CompressedPlacement | None:
    """Compress `row` with the first of these codecs that applies, or return None."""
    for codec in codecs:
        encoded = CODECS[codec].encode(row)
        if encoded is not None:
            return CompressedPlacement(encoded)
    return None


def put_by_choice(chooser: Chooser, row: Tensor, op_name: str) -> CompressedPlacement | None:
    """Compress `row` with the codec that the chooser finds best, or return None if none makes it smaller."""
    encoded = chooser.encode(row, op_name)
    return None if encoded is None else CompressedPlacement(encoded)


def codec_workspace(nbytes: int) -> int:
    """Return the bytes that a codec may allocate in addition to its result."""
    return min(4 * nbytes, 16 * CHUNK_ELEMENTS)
