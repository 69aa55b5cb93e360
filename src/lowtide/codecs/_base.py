"""What a codec is: a way to hold the content of a storage in fewer bytes.

A codec takes a tensor that covers memory densely (any dtype, any order of strides) and gives an `Encoded`,
or None where it does not apply or would not be smaller. Decoding makes a new tensor of the same dtype, shape,
strides and device. Exact codecs give back every bit, also of NaNs, negative zeros and subnormal numbers;
lossy ones state their error bound. The tensor given is never modified, and nothing of it is held afterwards.

Encoding and decoding work through the memory in chunks, so that what they take beside the result is a few
MiB, whatever the size (`bytes`: its result once more): they run when memory is short. Subclasses only see one row
of elements in memory order. All is in torch ops, or NumPy's where those
are quicker on a CPU, so it runs where the tensor is; only a CPU has been tried.
Not encoded at all, because there is no plain memory to speak of: tensor subclasses, sparse and quantised
layouts, lazily conjugated or negated views, tensors with gaps or overlaps, and those without elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from .._errors import ArgumentError

Tensor = torch.Tensor

CHUNK_ELEMENTS = 2**18  # elements in one chunk: a multiple of every block, and small enough for a cache
SCALAR_BYTES = 8

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a tensor is apart from its content."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    count: int
    """How many elements there are."""

    @property
    def nbytes(self) -> int:
        """What the tensor takes."""
        return self.count * self.dtype.itemsize


class FixedSize(NamedTuple):
    """What a codec takes for any content, as long as that is finite."""

    bits: int
    """For each element."""
    block_bytes: int = 0
    """More for every 64 of them."""
    work_bytes_per_element: int = 0
    """For each element of a chunk, while it encodes or decodes; more where values are near the ends of their range."""


class EncodedRow(NamedTuple):
    """What a subclass makes of a row."""

    parts: tuple[Tensor, ...]
    scalars: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """The content of a tensor, held by a codec."""

    codec: str
    parts: tuple[Tensor, ...] = field(repr=False)
    """Where the codec put them: on the tensor's device, or in host memory (`bytes`)."""
    scalars: tuple[int, ...]
    """Single numbers, up to 64 bits each."""
    geometry: Geometry

    @property
    def nbytes(self) -> int:
        """All the bytes held, of whole storages; the few Python objects around them are not counted."""
        return sum(part.untyped_storage().nbytes() for part in self.parts) + SCALAR_BYTES * len(self.scalars)

    @property
    def ratio(self) -> float:
        """How many times smaller than the tensor; nothing at all, which is what zeros may take, counts as a byte."""
        return self.geometry.nbytes / max(self.nbytes, 1)


class Codec(ABC):
    """One way to hold a tensor in fewer bytes. Codecs have no state and may be used from several threads."""

    name: ClassVar[str]
    exact: ClassVar[bool]
    error_bound: ClassVar[str | None] = None
    """For a lossy codec: how far a decoded finite value x̂ may be from x."""

    def encode(self, tensor: Tensor) -> Encoded | None:
        """`tensor`, held smaller; None where this codec does not apply or would not be smaller."""
        geometry = geometry_of(tensor)
        if geometry is None or not self.accepts(geometry.dtype):
            return None
        packed = self._encode_row(row_of(tensor, geometry.count))
        if packed is None:
            return None
        encoded = Encoded(self.name, packed.parts, packed.scalars, geometry)
        return encoded if encoded.nbytes < geometry.nbytes else None

    def decode(self, encoded: Encoded) -> Tensor:
        """A new tensor with the content that was encoded."""
        if encoded.codec != self.name:
            raise ArgumentError(f"this was encoded by {encoded.codec!r} and cannot be decoded by {self.name!r}")
        geometry = encoded.geometry
        tensor = torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype, device=geometry.device)
        self._decode_row(encoded, row_of(tensor, geometry.count))
        return tensor

    def accepts(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded at all."""
        return True

    def fixed_size(self, dtype: torch.dtype, *, binary: bool = False) -> FixedSize | None:
        """What tensors of this dtype take whatever they contain; None where that depends on it.

        `binary`: their elements are known to be two different ones at most.
        """
        return None

    @abstractmethod
    def _encode_row(self, row: Tensor) -> EncodedRow | None:
        """The elements in memory order, at least one, packed; they must not be written."""

    @abstractmethod
    def _decode_row(self, encoded: Encoded, row: Tensor) -> None:
        """Write the elements into `row`."""

    def __repr__(self) -> str:
        return f"<codec {self.name!r}, {'exact' if self.exact else 'lossy'}>"


def geometry_of(tensor: Tensor) -> Geometry | None:
    """The geometry of a tensor that codecs take, else None."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.device.type == "meta":
        return None
    count = tensor.numel()
    if count == 0 or not (tensor.is_contiguous() or _is_dense(tensor)):
        return None
    return Geometry(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, count)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements, in some order, are one behind the other."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def row_of(tensor: Tensor, count: int) -> Tensor:
    """The `count` elements of a dense tensor in the order of the memory, as a view that has no history."""
    if tensor.dim() == 1 and not tensor.requires_grad:
        return tensor
    return tensor.detach().as_strided((count,), (1,), tensor.storage_offset())


def as_bits(row: Tensor) -> Tensor:
    """The same memory as integers of the same width (two of them for each complex128)."""
    return row.view(_BITS[row.dtype.itemsize])


def chunks(count: int) -> Iterator[slice]:
    """The row, chunk by chunk."""
    for start in range(0, count, CHUNK_ELEMENTS):
        yield slice(start, min(start + CHUNK_ELEMENTS, count))


def sample(row: Tensor, parts: int = 16, length: int = 1024) -> Tensor:
    """A small part of the row: runs of elements from all over it, or all of it where it is small."""
    count = len(row)
    if count <= 2 * parts * length:
        return row
    starts = [(count - length) * i // (parts - 1) for i in range(parts)]
    return torch.cat([row[start : start + length] for start in starts])


def extremes(bits: Tensor) -> tuple[int, int]:
    """The least and the largest of some integers."""
    least, largest = torch.aminmax(bits)
    return int(least), int(largest)


def index_dtype(count: int) -> torch.dtype:
    """The narrowest integers that can count so far."""
    return torch.int32 if count <= 2**31 else torch.int64
