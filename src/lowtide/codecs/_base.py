"""Base class of codecs, its records, and helpers that codecs share.

`encode` compresses a dense tensor of any dtype and stride order. It returns None if the codec does not apply
or the result would not be smaller. `decode` returns a new tensor with the same dtype, shape, strides and
device. Exact codecs restore every bit, including NaN payloads, negative zeros and subnormal numbers. Lossy
codecs state an error bound. The input tensor is not modified, and no reference to it is kept.

Codecs run when memory is short, so they work in chunks. Besides the result they allocate a few MiB, whatever
the size of the tensor; `bytes` allocates its result twice. Subclasses handle one row of elements in memory
order. They use torch ops, or NumPy where NumPy is faster on CPU. Only CPU has been tested.

Some tensors are never compressed: tensor subclasses, sparse and quantised layouts, lazily conjugated or
negated views, tensors with gaps or overlaps, and empty tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from .._errors import ArgumentError

Tensor = torch.Tensor

CHUNK_ELEMENTS = 2**18  # a multiple of every block size; small enough for the CPU cache
SCALAR_BYTES = 8

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything about a tensor except its content."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    count: int
    """Number of elements."""

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.count * self.dtype.itemsize


class FixedSize(NamedTuple):
    """Compressed size of a codec that does not depend on the content, as long as all elements are finite."""

    bits: int
    """Compressed bits per element."""
    block_bytes: int = 0
    """Additional compressed bytes per block of 64 elements."""
    work_bytes_per_element: int = 0
    """Temporary bytes per element while a chunk is compressed or decompressed.

    Values near the limits of their dtype may need more."""


class EncodedRow(NamedTuple):
    """Result of a codec for one row of elements."""

    parts: tuple[Tensor, ...]
    scalars: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """A compressed tensor."""

    codec: str
    parts: tuple[Tensor, ...] = field(repr=False)
    """Compressed data, on the device of the tensor, or in host memory for `bytes`."""
    scalars: tuple[int, ...]
    """Additional numbers of up to 64 bits each."""
    geometry: Geometry

    @property
    def nbytes(self) -> int:
        """Compressed size: the storages of all parts and the scalars, without Python objects."""
        return sum(part.untyped_storage().nbytes() for part in self.parts) + SCALAR_BYTES * len(self.scalars)

    @property
    def ratio(self) -> float:
        """Size of the tensor divided by the compressed size. A compressed size of 0 counts as one byte."""
        return self.geometry.nbytes / max(self.nbytes, 1)


class Codec(ABC):
    """Base class of all codecs. Codecs have no state and are thread-safe."""

    name: ClassVar[str]
    exact: ClassVar[bool]
    error_bound: ClassVar[str | None] = None
    """For lossy codecs: the largest distance between a finite value x and its decompressed value x̂."""

    def encode(self, tensor: Tensor) -> Encoded | None:
        """Compress `tensor`. Return None if the codec does not apply or the result would not be smaller."""
        geometry = geometry_of(tensor)
        if geometry is None or not self.accepts(geometry.dtype):
            return None
        encoded_row = self._encode_row(row_of(tensor, geometry.count))
        if encoded_row is None:
            return None
        encoded = Encoded(self.name, encoded_row.parts, encoded_row.scalars, geometry)
        return encoded if encoded.nbytes < geometry.nbytes else None

    def decode(self, encoded: Encoded) -> Tensor:
        """Decompress to a new tensor."""
        if encoded.codec != self.name:
            raise ArgumentError(
                f"codec {self.name!r} cannot decode a tensor encoded by {encoded.codec!r}: use lowtide.codecs.decode"
            )
        geometry = encoded.geometry
        tensor = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device=geometry.device)
        self._decode_row(encoded, row_of(tensor, geometry.count))
        return tensor

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return whether the codec applies to tensors of this dtype."""
        return True

    def fixed_size(self, dtype: torch.dtype, *, binary: bool = False, device: str = "cpu") -> FixedSize | None:
        """Return the compressed size for this dtype, or None if the size depends on the content.

        `binary` means that the tensors have at most two distinct elements. `device` is the type of their device.
        """
        return None

    @abstractmethod
    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        """Compress the elements of a non-empty row without writing to it. Return None if that does not pay."""

    @abstractmethod
    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        """Decompress into `row`."""

    def __repr__(self) -> str:
        return f"<codec {self.name!r}, {'exact' if self.exact else 'lossy'}>"


def geometry_of(tensor: Tensor) -> Geometry | None:
    """Return the geometry of `tensor`, or None if codecs do not apply to it."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
        return None
    count = tensor.numel()
    if count == 0 or not (tensor.is_contiguous() or _is_dense(tensor)):
        return None
    return Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, count)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def row_of(tensor: Tensor, count: int) -> Tensor:
    """Return a detached 1-d view of the `count` elements of a dense tensor, in memory order."""
    if tensor.dim() == 1 and not tensor.requires_grad:
        return tensor
    return tensor.detach().as_strided((count,), (1,), tensor.storage_offset())


def as_bits(row: Tensor) -> Tensor:
    """Return a view of the row as integers of the same width. A complex128 element becomes two integers."""
    return row.view(_BITS[row.dtype.itemsize])


def chunks(count: int) -> Iterator[slice]:
    """Yield the slices that split a row of `count` elements into chunks."""
    for start in range(0, count, CHUNK_ELEMENTS):
        yield slice(start, min(start + CHUNK_ELEMENTS, count))


def sample(row: Tensor, parts: int = 16, length: int = 1024) -> Tensor:
    """Return `parts` evenly spaced runs of `length` elements, or the whole row if it is small."""
    count = len(row)
    if count <= 2 * parts * length:
        return row
    starts = [(count - length) * i // (parts - 1) for i in range(parts)]
    return torch.cat([row[start : start + length] for start in starts])


def extremes(bits: Tensor) -> tuple[int, int]:
    """Return the smallest and the largest of some integers."""
    least, largest = torch.aminmax(bits)
    return int(least), int(largest)


def index_dtype(count: int) -> torch.dtype:
    """Return the narrowest dtype for indices below `count`."""
    return torch.int32 if count <= 2**31 else torch.int64
