"""Bit-packing with NumPy, used on CPU, and with torch ops, used on other devices, gives the same bitmaps."""

import tracemalloc

import pytest
import torch

from lowtide.codecs import CODECS, decode
from lowtide.codecs._bitmap import bitmap_bytes, pack_bits, pack_bits_torch, unpack_bits, unpack_bits_torch
from lowtide.codecs.costs import measure_codec_cost
from lowtide.codecs.mask import pack_mask_torch, unpack_mask_torch


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000, 4099])
@pytest.mark.parametrize("offset", [0, 3])
def test_numpy_and_torch_bitmaps_are_equal_and_round_trip(count: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(count)
    flags = (torch.rand(count + offset, generator=generator) > 0.4)[offset:]
    bitmap = pack_bits(flags)
    assert bitmap.shape == (bitmap_bytes(count),)
    assert torch.equal(pack_bits_torch(flags), bitmap)
    assert torch.equal(unpack_bits(bitmap, slice(0, count)), flags)
    assert torch.equal(unpack_bits_torch(bitmap, count), flags)


@pytest.mark.parametrize("count", [1, 9, 64, 4099])
@pytest.mark.parametrize("two", [(0.0, 1.0), (0.0, 1.25), (-2.5, 1e-40), (3.0, 3.0)])
def test_mask_codec_gives_the_same_bitmap_with_torch_ops(count: int, two: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(count)
    mask = torch.tensor(two)[(torch.rand(count, generator=generator) > 0.4).long()]
    bits = mask.view(torch.int32)
    low, high = int(bits.min()), int(bits.max())
    bitmap = pack_mask_torch(bits, low, high)
    assert bitmap is not None
    assert pack_mask_torch(torch.cat([bits, torch.tensor([7], dtype=torch.int32)]), low, high) is None
    unpacked = torch.empty_like(bits)
    unpack_mask_torch(bitmap, low, low ^ high, unpacked)
    assert torch.equal(unpacked, bits)
    if (encoded := CODECS["mask"].encode(mask)) is not None:  # None for a few elements: not smaller
        assert encoded.scalars == (low, low ^ high)
        assert torch.equal(encoded.parts[0], bitmap)
        assert torch.equal(decode(encoded), mask)


@pytest.mark.parametrize("count", [2**16, 2**21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_the_predicted_workspace_of_masks_is_that_of_numpy(count: int, dtype: torch.dtype) -> None:
    mask = torch.rand(count, generator=torch.Generator().manual_seed(0)) > 0.4
    tensor = mask if dtype is torch.bool else mask.to(dtype) / 0.6
    codec_cost = measure_codec_cost("mask", str(dtype).removeprefix("torch."), binary=True)
    assert codec_cost is not None
    predicted = codec_cost.workspace_bytes(tensor.nbytes)
    encoded = CODECS["mask"].encode(tensor)  # also fills caches
    assert encoded is not None
    decode(encoded)
    tracemalloc.start()
    try:
        again = CODECS["mask"].encode(tensor)
        compressing = tracemalloc.get_traced_memory()[1] - encoded.nbytes
        del again
        tracemalloc.reset_peak()
        decode(encoded)
        decompressing = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert predicted / 2 <= max(compressing, decompressing) <= predicted
