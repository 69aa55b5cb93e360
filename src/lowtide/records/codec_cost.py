"""How a codec holds values, as planning sees it: bytes that do not depend on the content, and two speeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK = 64
"""Elements that share a scale, in codecs that have some."""


@dataclass(frozen=True)
class CodecCost:
    """Values of one dtype, held by one codec. A plan promises bytes, so that only codecs of a known size are here."""

    codec: str
    dtype: str
    """As torch calls it: "float32"."""
    exact: bool
    itemsize: int
    bits: int
    """Of each element, packed."""
    block_bytes: int
    """More, for every 64 elements."""
    work_bytes_per_element: int
    """What packing or unpacking takes meanwhile, for each element of a piece."""
    chunk_elements: int
    """Elements that are packed at a time."""
    compress_s: float
    """To pack one value, beside its bytes."""
    compress_s_per_byte: float
    decompress_s: float
    decompress_s_per_byte: float
    min_bytes: int = 2**16
    """A smaller value is not worth it."""
    binary: bool = False
    """Only for values whose elements are known to be two different ones at most."""

    def compressed_bytes(self, nbytes: int) -> int:
        """What a value takes, packed."""
        count = nbytes // self.itemsize
        return -(-count * self.bits // 8) + -(-count // BLOCK) * self.block_bytes

    def workspace_bytes(self, nbytes: int) -> int:
        """What packing or unpacking a value takes meanwhile."""
        return self.work_bytes_per_element * min(self.chunk_elements, nbytes // self.itemsize)

    def compression_s(self, nbytes: int) -> float:
        """How long packing takes."""
        return self.compress_s + nbytes * self.compress_s_per_byte

    def decompression_s(self, nbytes: int) -> float:
        """How long unpacking takes."""
        return self.decompress_s + nbytes * self.decompress_s_per_byte

    def accepts(self, dtype: str, nbytes: int, binary: bool) -> bool:
        """Whether such a value can be packed, and is worth it."""
        fits = dtype == self.dtype and (binary or not self.binary)
        return fits and nbytes >= self.min_bytes and self.compressed_bytes(nbytes) < nbytes


def suitable_codec_costs(codec_costs: Iterable[CodecCost], dtype: str, nbytes: int, *, binary: bool) -> list[CodecCost]:
    """Those that take such a value: exact ones before any other, then the smallest."""
    taking = [codec_cost for codec_cost in codec_costs if codec_cost.accepts(dtype, nbytes, binary)]
    return sorted(taking, key=lambda codec_cost: (not codec_cost.exact, codec_cost.compressed_bytes(nbytes)))
