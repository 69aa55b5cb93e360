"""Compressing: values that stay in memory, smaller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..codecs import CODECS, Chooser, Encoded, decode
from ..codecs._contract import PIECE
from .eviction import seat_of
from .ledger import Ledger
from .values import Tensor, Value, flat

_QUICKEST_US = 5e-4  # for a byte, a guess on the safe side: 2 GB a second for packing and unpacking


class Compressing:
    """What one room compresses."""

    def __init__(self, chooser: Chooser, ledger: Ledger, counts: Counter[str]) -> None:
        self.chooser = chooser
        self.ledger = ledger
        self.counts = counts

    def us_per_byte(self, value: Value, free: int, less_than: float) -> float:
        """What it takes to compress and decompress a value, for each byte that this saves.

        Looked at only where it can be `less_than` another way takes, because looking takes time too.
        """
        assert value.tensor is not None
        if less_than <= _QUICKEST_US or free < value.nbytes + workspace(value.nbytes):
            return float("inf")  # compressing takes memory too, and there is none
        seat = seat_of(value)
        if seat.codec_us is None:
            measured = self.chooser.measurements(flat(value.tensor), _kind(value))
            seat.codec_us = float("inf")
            if measured:
                seat.codec_us = 1e6 / measured[0].round_trip_bytes_per_second / (1 - 1 / measured[0].ratio)
        return seat.codec_us

    def evict(self, value: Value) -> None:
        """Hold a value compressed, if that makes it smaller."""
        assert value.tensor is not None
        encoded = self.chooser.encode(flat(value.tensor), _kind(value))
        if encoded is None:  # the sample was not like the whole
            return
        self._count(value, encoded)
        seat_of(value).encoded = encoded
        value.let_go()

    def _count(self, value: Value, encoded: Encoded) -> None:
        self.ledger.see_all(encoded.parts)
        self.counts["compressed"] += 1
        self.counts["compressed bytes"] += value.nbytes
        self.counts["compressed to bytes"] += encoded.nbytes


def pack(value: Value, tensor: Tensor, codecs: Sequence[str]) -> None:
    """Hold a value, of which `tensor` is a view, only by the first of these codecs that can, unless none can."""
    row = flat(tensor)
    for codec in codecs:
        encoded = CODECS[codec].encode(row)
        if encoded is not None:
            seat_of(value).encoded = encoded
            return
    value.hold(tensor, tensor.untyped_storage())


def unpack(value: Value) -> None:
    """Give a packed value its content again."""
    seat = seat_of(value)
    assert seat.encoded is not None
    value.own(decode(seat.encoded))
    seat.encoded = None


def workspace(nbytes: int) -> int:
    """What a codec may take beside its result."""
    return min(4 * nbytes, 16 * PIECE)


def _kind(value: Value) -> str:
    return value.origin.facts.name if value.origin is not None else ""
