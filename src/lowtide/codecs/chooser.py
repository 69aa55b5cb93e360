"""Selects the codec for a value: measured once for each category of values, then remembered.

The category of a value is its dtype, size class (powers of two), device, a key of the caller such as the op
name, and a content summary of 256 elements: whether they have one, two or more distinct elements, and
whether many are zeros. The summary is needed because one op makes different content: a product may be a
dropout mask or an activation.

For the first value of a category, every allowed codec is tried on a small sample. Codecs that make the sample
smaller are timed on a larger one of at most 256 Ki elements. A codec is usable if it reaches `min_ratio`, saves
`min_saved_bytes` and its round trip is not slower than `min_bytes_per_second`. Usable codecs are ranked by
compressed size; sizes within 5 % are equal, and the faster codec wins. An exact codec wins over a lossy one
unless the lossy one saves another fifth.

A sample may mislead, so the result of `encode` is checked on the whole value. A category whose first codec
fails three times in a row is measured again, later after six failures, then twelve, and so on. A category
without a usable codec is measured again after 64 values. The number of categories is limited. Speeds are
wall-clock times on a machine in use, not benchmarks.
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
"""Factor on the compressed size of lossy codecs when codecs are ranked."""
SIZE_TOLERANCE = 1.05
"""Compressed sizes within this factor count as equal."""
MAX_FAILURES = 3
"""Failures in a row of the first codec before a category is measured again. Doubles each time."""
RETRY_AFTER = 64
"""Values of a category without a usable codec before the category is measured again."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Ratio and speed of a codec on a sample. Speeds count uncompressed bytes."""

    codec: Codec
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float

    @property
    def round_trip_bytes_per_second(self) -> float:
        """Speed of one compression followed by one decompression."""
        return 1 / (1 / self.encode_bytes_per_second + 1 / self.decode_bytes_per_second)

    @property
    def size_score(self) -> float:
        """Compressed share of the bytes, with the penalty for lossy codecs. Lower is better."""
        return (1.0 if self.codec.exact else LOSSY_PENALTY) / self.ratio


class _Category:
    """Ranked codecs of one category of values, and their recent failures."""

    __slots__ = ("failures", "lookups", "max_failures", "ranked")

    def __init__(self, ranked: tuple[Measurement, ...], max_failures: int) -> None:
        self.ranked = ranked
        self.max_failures = max_failures
        self.lookups = 0
        self.failures = 0  # in a row, of the codec ranked first

    def used(self, rank: int | None) -> None:
        """Count a success or failure of the first codec. `rank` is the codec that was used, or None."""
        self.failures = 0 if rank == 0 else self.failures + 1

    def is_stale(self) -> bool:
        return self.failures >= self.max_failures if self.ranked else self.lookups >= RETRY_AFTER


class Chooser:
    """Selects among the `allowed` codecs and remembers measurements. Thread-safe."""

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
        self._categories: OrderedDict[Hashable, _Category] = OrderedDict()
        self._lock = threading.Lock()

    def choose(self, tensor: Tensor, key: Hashable = None) -> Codec | None:
        """Return the codec expected to be best for `tensor`, or None. `key` is part of the category."""
        category = self._category(tensor, key)
        geometry = geometry_of(tensor)
        if category is None or geometry is None:
            return None
        small_sample = sample(row_of(tensor, geometry.count))
        for rank, measured in enumerate(category.ranked):
            # Values of one category differ, so the codec is tried on a sample of this one.
            encoded = measured.codec.encode(small_sample)
            if encoded is not None and encoded.ratio >= self.min_ratio:
                category.used(rank)
                return measured.codec
        category.used(None)
        return None

    def encode(self, tensor: Tensor, key: Hashable = None) -> Encoded | None:
        """Compress `tensor` with the best usable codec. Return None if no codec saves enough."""
        category = self._category(tensor, key)
        if category is None:
            return None
        for rank, measured in enumerate(category.ranked):
            encoded = measured.codec.encode(tensor)
            if encoded is not None and self._saves_enough(encoded.geometry.nbytes, encoded.ratio):
                category.used(rank)
                return encoded
        category.used(None)
        return None

    def measurements(self, tensor: Tensor, key: Hashable = None) -> tuple[Measurement, ...]:
        """Return the measurements of the usable codecs for the category of `tensor`, best first."""
        category = self._category(tensor, key)
        return category.ranked if category is not None else ()

    def clear(self) -> None:
        """Forget all measurements."""
        with self._lock:
            self._categories.clear()

    def __len__(self) -> int:
        return len(self._categories)

    def _saves_enough(self, nbytes: int, ratio: float) -> bool:
        return ratio >= self.min_ratio and nbytes - nbytes / ratio >= self.min_saved_bytes

    def _category(self, tensor: Tensor, key: Hashable) -> _Category | None:
        geometry = geometry_of(tensor)
        if geometry is None or geometry.nbytes < self.min_saved_bytes:
            return None
        content = content_summary(row_of(tensor, geometry.count))
        category_key = (key, geometry.dtype, geometry.nbytes.bit_length(), geometry.device.type, content)
        max_failures = MAX_FAILURES
        with self._lock:
            known = self._categories.get(category_key)
            if known is not None:
                self._categories.move_to_end(category_key)
                known.lookups += 1
                if not known.is_stale():
                    return known
                if known.ranked:
                    max_failures = 2 * known.max_failures  # mixed content is measured less and less often
        category = _Category(self._rank(tensor, geometry), max_failures)
        with self._lock:
            self._categories[category_key] = category
            self._categories.move_to_end(category_key)
            while len(self._categories) > self._max_categories:
                self._categories.popitem(last=False)
        return category

    def _rank(self, tensor: Tensor, geometry: Geometry) -> tuple[Measurement, ...]:
        row = row_of(tensor, geometry.count)
        small_sample = sample(row)
        candidates = [codec for codec in self.allowed if codec.encode(small_sample) is not None]
        if not candidates:
            return ()
        large_sample = sample(row, length=CHUNK_ELEMENTS // 16)
        measured = (measure(codec, large_sample) for codec in candidates)
        usable = [
            one
            for one in measured
            if one is not None
            and self._saves_enough(geometry.nbytes, one.ratio)
            and one.round_trip_bytes_per_second >= self.min_bytes_per_second
        ]
        tie = min((one.size_score for one in usable), default=0.0) * SIZE_TOLERANCE
        return tuple(sorted(usable, key=lambda one: (max(one.size_score, tie), -one.round_trip_bytes_per_second)))


def measure(codec: Codec, tensor: Tensor, rounds: int = 2) -> Measurement | None:
    """Return ratio and speed of a codec on `tensor`, the fastest of `rounds`. None if the codec does not apply."""
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


def content_summary(row: Tensor) -> tuple[int, bool]:
    """Return the number of distinct elements among about 256 (1, 2, or 3 for more), and whether many are zeros."""
    bits = as_bits(row)
    few = bits[:: max(1, len(bits) // 256) | 1]  # an odd step does not stay in one column of a matrix
    distinct = torch.unique(few)
    return min(len(distinct), 3), int(torch.count_nonzero(few)) < 0.75 * len(few)


def _now(tensor: Tensor) -> float:
    if tensor.device.type != "cpu":  # not tested on an accelerator
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter()


def choose(tensor: Tensor, allowed: str | Sequence[str] | None = "exact", key: Hashable = None) -> Codec | None:
    """Return the codec among `allowed` expected to be best for `tensor`, or None.

    Measurements are shared by the whole process, for each set of allowed codecs.
    """
    chooser = shared_chooser(allowed)
    return chooser.choose(tensor, key) if chooser is not None else None


def shared_chooser(allowed: str | Sequence[str] | None) -> Chooser | None:
    """Return the chooser that the process shares for these codecs, or None if no codec is allowed.

    It is shared because measuring a category takes as long as many ops.
    """
    codecs = resolve(allowed)
    return _cached_chooser(codecs) if codecs else None


@lru_cache(maxsize=32)  # measurements are facts about the machine
def _cached_chooser(allowed: tuple[Codec, ...]) -> Chooser:
    return Chooser(allowed)
