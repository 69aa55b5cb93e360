"""Which codec pays for a value: measured once for each kind of value, then remembered.

A kind is a dtype, a size class (powers of two), a device, whatever the caller adds, such as the op that made the
value, and a glance at 256 elements: whether they are one, two or more different ones, and whether many are zeros
(one op makes dropout masks and activations alike: a product). At the first value of a kind every allowed codec is
tried on a small sample; those that make it smaller are timed on a larger one (256 Ki elements at most, so that
measuring takes little memory). A codec pays when it makes values at least `min_ratio` times smaller, saves at
least `min_saved_bytes`, and is not slower than `min_bytes_per_second` there and back. Of those that pay, that with
the fewest bytes is first (within 5 %: the fastest); an exact one is preferred to a lossy one that would not take
a fifth less.

The sample may mislead, so what `encode` gives is checked again, whole. A kind whose codec fails three times
running is measured anew (then after six times, twelve, and so on); one for which nothing pays is looked at again
after every 64 values. The number of remembered kinds is bounded. Speeds are wall-clock times on a machine in
use, not benchmarks.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ._base import CHUNK_ELEMENTS, Codec, Encoded, Geometry, Tensor, as_bits, geometry_of, row_of, sample
from .names import resolve

MIN_RATIO = 1.25
MIN_SAVED_BYTES = 64 * 2**10
MIN_BYTES_PER_SECOND = 100e6
MAX_CATEGORIES = 1024
LOSSY_PENALTY = 1.25
SIZE_TOLERANCE = 1.05
MAX_FAILURES = 3
RETRY_AFTER = 64


@dataclass(frozen=True, slots=True)
class Measurement:
    """How a codec did on a sample of a kind of value."""

    codec: Codec
    ratio: float
    encode_bytes_per_second: float
    """Bytes of the tensor, not of what is kept."""
    decode_bytes_per_second: float

    @property
    def round_trip_bytes_per_second(self) -> float:
        """There and back."""
        return 1 / (1 / self.encode_bytes_per_second + 1 / self.decode_bytes_per_second)

    @property
    def score(self) -> float:
        """What is kept of each byte; lossy codecs have to be better by a fifth."""
        return (1.0 if self.codec.exact else LOSSY_PENALTY) / self.ratio


class _Kind:
    __slots__ = ("asked", "failures", "patience", "ranked")

    def __init__(self, ranked: tuple[Measurement, ...], patience: int) -> None:
        self.ranked = ranked
        self.patience = patience
        self.asked = 0
        self.failures = 0  # running, of the codec ranked first

    def note(self, place: int) -> None:
        """The codec at this place was the first that did."""
        self.failures = 0 if place == 0 else self.failures + 1

    def stale(self) -> bool:
        return self.failures >= self.patience if self.ranked else self.asked >= RETRY_AFTER


class Chooser:
    """Chooses among some codecs, and remembers. May be used from several threads."""

    def __init__(
        self,
        allowed: Sequence[Codec],
        *,
        min_ratio: float = MIN_RATIO,
        min_saved_bytes: int = MIN_SAVED_BYTES,
        min_bytes_per_second: float = MIN_BYTES_PER_SECOND,
        max_categories: int = MAX_CATEGORIES,
    ) -> None:
        self.allowed = tuple(allowed)
        self.min_ratio = min_ratio
        self.min_saved_bytes = min_saved_bytes
        self.min_bytes_per_second = min_bytes_per_second
        self._max_categories = max_categories
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._lock = threading.Lock()

    def choose(self, tensor: Tensor, key: Hashable = None) -> Codec | None:
        """The codec that is expected to pay best for `tensor`, or None. `key` says more of its kind."""
        kind = self._kind(tensor, key)
        geometry = geometry_of(tensor)
        if kind is None or geometry is None:
            return None
        few = sample(row_of(tensor, geometry.count))
        for place, measured in enumerate(kind.ranked):
            # Values of one kind differ; a sample of this one is soon encoded.
            encoded = measured.codec.encode(few)
            if encoded is not None and encoded.ratio >= self.min_ratio:
                kind.note(place)
                return measured.codec
        kind.note(len(self.allowed))
        return None

    def encode(self, tensor: Tensor, key: Hashable = None) -> Encoded | None:
        """`tensor`, by the best codec that pays for it indeed; None where none does."""
        kind = self._kind(tensor, key)
        if kind is None:
            return None
        for place, measured in enumerate(kind.ranked):
            encoded = measured.codec.encode(tensor)
            if encoded is not None and self._pays(encoded.geometry.nbytes, encoded.ratio):
                kind.note(place)
                return encoded
        kind.note(len(self.allowed))
        return None

    def measurements(self, tensor: Tensor, key: Hashable = None) -> tuple[Measurement, ...]:
        """What is known of the codecs that pay for this kind of value, the best first."""
        kind = self._kind(tensor, key)
        return kind.ranked if kind is not None else ()

    def __len__(self) -> int:
        return len(self._kinds)

    def _pays(self, nbytes: int, ratio: float) -> bool:
        return ratio >= self.min_ratio and nbytes - nbytes / ratio >= self.min_saved_bytes

    def _kind(self, tensor: Tensor, key: Hashable) -> _Kind | None:
        geometry = geometry_of(tensor)
        if geometry is None or geometry.nbytes < self.min_saved_bytes:
            return None
        look = glance(row_of(tensor, geometry.count))
        name = (key, geometry.dtype, geometry.nbytes.bit_length(), geometry.device.type, look)
        patience = MAX_FAILURES
        with self._lock:
            known = self._kinds.get(name)
            if known is not None:
                self._kinds.move_to_end(name)
                known.asked += 1
                if not known.stale():
                    return known
                if known.ranked:
                    patience = 2 * known.patience  # a kind that is a mixture is not measured again and again
        kind = _Kind(self._examine(tensor, geometry), patience)
        with self._lock:
            self._kinds[name] = kind
            self._kinds.move_to_end(name)
            while len(self._kinds) > self._max_categories:
                self._kinds.popitem(last=False)
        return kind

    def _examine(self, tensor: Tensor, geometry: Geometry) -> tuple[Measurement, ...]:
        row = row_of(tensor, geometry.count)
        few = sample(row)
        candidates = [codec for codec in self.allowed if codec.encode(few) is not None]
        if not candidates:
            return ()
        more = sample(row, length=CHUNK_ELEMENTS // 16)
        found = (measure(codec, more) for codec in candidates)
        paying = [
            one
            for one in found
            if one is not None
            and self._pays(geometry.nbytes, one.ratio)
            and one.round_trip_bytes_per_second >= self.min_bytes_per_second
        ]
        least = min((one.score for one in paying), default=0.0) * SIZE_TOLERANCE
        # max: those about as small as the smallest are one class, and the fastest of it is first.
        return tuple(sorted(paying, key=lambda one: (max(one.score, least), -one.round_trip_bytes_per_second)))


def measure(codec: Codec, tensor: Tensor, rounds: int = 2) -> Measurement | None:
    """Ratio and speed of a codec on `tensor`, the better of some rounds; None where it does not apply."""
    encode_s = decode_s = float("inf")
    encoded = None
    for _ in range(rounds):
        start = _now(tensor)
        encoded = codec.encode(tensor)
        encode_s = min(encode_s, _now(tensor) - start)
        if encoded is None:
            return None
        start = _now(tensor)
        codec.decode(encoded)
        decode_s = min(decode_s, _now(tensor) - start)
    if encoded is None:
        return None
    nbytes = encoded.geometry.nbytes
    return Measurement(codec, encoded.ratio, nbytes / encode_s, nbytes / decode_s)


def glance(row: Tensor) -> tuple[int, bool]:
    """How many different elements (1, 2 or 3 for more) a few from all over the row are; whether many are zeros."""
    bits = as_bits(row)
    few = bits[:: max(1, len(bits) // 256) | 1]  # an odd step, not to stay in one column of a matrix
    different = torch.unique(few)
    return min(len(different), 3), int(torch.count_nonzero(few)) < 0.75 * len(few)


def _now(tensor: Tensor) -> float:
    if tensor.device.type != "cpu":  # not yet run on an accelerator
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter()


def choose(tensor: Tensor, allowed: str | Sequence[str] | None = "exact", key: Hashable = None) -> Codec | None:
    """The codec among `allowed` that is expected to pay best for `tensor`, or None, as a `Chooser` does it.

    What is measured is remembered for the process, for each set of allowed codecs.
    """
    chooser = shared_chooser(allowed)
    return chooser.choose(tensor, key) if chooser is not None else None


def shared_chooser(allowed: str | Sequence[str] | None) -> Chooser | None:
    """The chooser among these codecs that the whole process uses; None where none is allowed.

    Measuring a kind of value takes as long as many ops, so that a chooser for each scope would cost more than it gives.
    """
    codecs = resolve(allowed)
    return _cached_chooser(codecs) if codecs else None


@lru_cache(maxsize=32)
def _cached_chooser(allowed: tuple[Codec, ...]) -> Chooser:
    return Chooser(allowed)
