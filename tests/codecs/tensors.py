"""Tensors for the codec tests, with any bit pattern and dense layout, and bitwise comparison."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)

# Bits of a float32. The upper half is used for float16 and bfloat16; float64 uses them as its upper half.
SPECIAL_BITS = (
    0x00000000,
    0x80000000,  # -0.0
    0x7F800000,  # inf
    0xFF800000,  # -inf
    0x7FC00000,  # default NaN
    0x7FC00001,  # NaN with a payload
    0xFFC12345,
    0x7F800001,  # signalling NaN
    0x00000001,  # subnormal
    0x807FFFFF,
    0x7F7FFFFF,  # largest float32
    0x7C000000,  # inf of float16
    0x7E010000,
    0x7FF00000,  # inf of float64
    0x3F800000,
    0x01010101,
)


def memory(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a dense tensor in memory order."""
    row = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return row.view(torch.uint8).numpy()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two dense tensors have the same type, dtype, layout, device and bits."""
    return (
        (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device)
        and type(a) is type(b)
        and np.array_equal(memory(a), memory(b))
    )


def laid_out(row: torch.Tensor, shape: tuple[int, ...], order: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    """Return a tensor of `shape` whose memory is `row`. `order` lists the dimensions, largest stride first."""
    strides = [0] * len(shape)
    stride = 1
    for dimension in reversed(order):
        strides[dimension] = stride
        stride *= shape[dimension]
    storage = torch.zeros(offset + len(row), dtype=row.dtype)
    storage.view(torch.uint8)[offset * row.dtype.itemsize :] = row.view(torch.uint8)
    return storage.as_strided(shape, strides, offset)


def from_bytes(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


def element_bytes(itemsize: int) -> st.SearchStrategy[bytes]:
    """Return a strategy for one element: any bits, often special ones."""

    def widened(bits: int) -> bytes:
        four = bits.to_bytes(4, "little")
        return four[4 - itemsize :] if itemsize <= 4 else (bytes(4) + four) * (itemsize // 8)

    return st.sampled_from(SPECIAL_BITS).map(widened) | st.binary(min_size=itemsize, max_size=itemsize)


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> torch.Tensor:
    """Draw tensors of any dtype and dense layout, with few distinct elements, mostly one element, or any bits."""
    dtype = draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    count = math.prod(shape)
    palette = draw(st.lists(element_bytes(dtype.itemsize), min_size=1, max_size=6))
    if draw(st.booleans()):
        palette[0] = bytes(dtype.itemsize)
    content = draw(st.sampled_from(("palette", "mostly the first", "any bits")))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if content == "any bits":
        raw = rng.bytes(count * dtype.itemsize)
    else:
        picks = rng.integers(0, len(palette), count)
        if content == "mostly the first":
            picks *= rng.random(count) < 0.1
        raw = b"".join(palette[pick] for pick in picks)
    return laid_out(from_bytes(raw, dtype), shape, order, draw(st.integers(0, 3)))
