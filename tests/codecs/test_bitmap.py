"""Bit-packing with NumPy, used on CPU, and with torch ops, used on other devices, gives the same bitmaps."""

import pytest
import torch

from lowtide.codecs import CODECS, decode
from lowtide.codecs._bitmap import bitmap_bytes, pack_bits, pack_bits_torch, unpack_bits, unpack_bits_torch
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
