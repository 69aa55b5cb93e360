"""Compression under a memory budget: values that stay in memory in fewer bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ...codecs import Chooser
from ..values.value import Tensor, Value
from ..values.view import flat
from .eviction import residency_of
from .placement import codec_workspace, put_by_choice

_MIN_US_PER_BYTE = 5e-4
"""Lower limit on the time to compress and decompress one byte (2 GB/s). Doubled: codecs are tried less often."""


class Compression:
    """The compressed values of one memory budget."""

    def __init__(self, chooser: Chooser, on_hold: Callable[[Tensor], None], counts: Counter[str]) -> None:
        """Compress with the codecs of `chooser`. `on_hold` is called with each tensor of a compressed form."""
        self.chooser = chooser
        self.on_hold = on_hold
        self.counts = counts

    def us_per_byte(self, value: Value, free_bytes: int, less_than: float) -> float:
        """Return the time to compress and decompress a value per byte saved.

        Measuring takes time, so it is done only if the result can be `less_than` the cost of another way.
        """
        assert value.tensor is not None
        if less_than <= _MIN_US_PER_BYTE or free_bytes < value.nbytes + codec_workspace(value.nbytes):
            return float("inf")  # too slow, or no memory for the codec
        residency = residency_of(value)
        if residency.codec_us is None:
            measured = self.chooser.measurements(flat(value.tensor), _op_name(value))
            residency.codec_us = float("inf")
            if measured:
                residency.codec_us = 1e6 / measured[0].round_trip_bytes_per_second / (1 - 1 / measured[0].ratio)
        return residency.codec_us

    def evict(self, value: Value) -> None:
        """Compress a value, if that makes it smaller."""
        assert value.tensor is not None
        placement = put_by_choice(self.chooser, flat(value.tensor), _op_name(value))
        if placement is None:  # the measured sample was not like the whole
            return
        for part in placement.encoded.parts:
            self.on_hold(part)
        self.counts["compressed"] += 1
        self.counts["compressed bytes"] += value.nbytes
        self.counts["compressed to bytes"] += placement.encoded.nbytes
        residency_of(value).placement = placement
        value.release()


def _op_name(value: Value) -> str:
    return value.origin.facts.name if value.origin is not None else ""
