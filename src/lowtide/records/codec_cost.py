"""Compressed size and time of codecs, as the planner uses them.

A plan guarantees bytes, so only codecs whose compressed size does not depend on the content have a cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 64
"""Elements that share a scale, for codecs with scales."""


@dataclass(frozen=True)
class CodecCost:
    """Size and time of one codec for values of one dtype."""

    codec: str
    dtype: str
    """Name of the torch dtype, such as "float32"."""
    exact: bool
    itemsize: int
    bits: int
    """Compressed bits per element."""
    block_bytes: int
    """Additional compressed bytes per block of 64 elements."""
    work_bytes_per_element: int
    """Temporary bytes per element while a chunk is compressed or decompressed."""
    chunk_elements: int
    """Elements that are compressed or decompressed at a time."""
    compress_s: float
    """Fixed seconds to compress one value."""
    compress_s_per_byte: float
    decompress_s: float
    """Fixed seconds to decompress one value."""
    decompress_s_per_byte: float
    min_bytes: int = 2**16
    """Smallest value that is compressed."""
    binary: bool = False
    """Whether the codec applies only to values with at most two distinct elements."""

    def compressed_bytes(self, nbytes: int) -> int:
        """Return the compressed size of a value of `nbytes`."""
        count = nbytes // self.itemsize
        return -(-count * self.bits // 8) + -(-count // BLOCK) * self.block_bytes

    def workspace_bytes(self, nbytes: int) -> int:
        """Return the temporary bytes while a value of `nbytes` is compressed or decompressed."""
        return self.work_bytes_per_element * min(self.chunk_elements, nbytes // self.itemsize)

    def compression_s(self, nbytes: int) -> float:
        """Return the seconds to compress a value of `nbytes`."""
        return self.compress_s + nbytes * self.compress_s_per_byte

    def decompression_s(self, nbytes: int) -> float:
        """Return the seconds to decompress a value of `nbytes`."""
        return self.decompress_s + nbytes * self.decompress_s_per_byte

    def accepts(self, dtype: str, nbytes: int, binary: bool) -> bool:
        """Return whether the codec applies to such a value and makes it smaller."""
        applies = dtype == self.dtype and (binary or not self.binary)
        return applies and nbytes >= self.min_bytes and self.compressed_bytes(nbytes) < nbytes


def suitable_codec_costs(codec_costs: Iterable[CodecCost], dtype: str, nbytes: int, *, binary: bool) -> list[CodecCost]:
    """Return the costs that accept such a value: exact codecs first, then by compressed size."""
    suitable = [codec_cost for codec_cost in codec_costs if codec_cost.accepts(dtype, nbytes, binary)]
    return sorted(suitable, key=lambda codec_cost: (not codec_cost.exact, codec_cost.compressed_bytes(nbytes)))
