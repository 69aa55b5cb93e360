"""Bools, eight to a byte: NumPy's way, which a CPU takes, and that of torch ops, which other devices take, are one."""

import pytest
import torch

from lowtide.codecs import CODECS, decode
from lowtide.codecs._bitmap import bitmap_bytes, pack_bits, pack_bits_torch, unpack_bits, unpack_bits_torch
from lowtide.codecs.mask import pack_mask_torch, unpack_mask_torch


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000, 4099])
@pytest.mark.parametrize("offset", [0, 3])
def test_both_ways_agree_and_give_back_what_they_were_given(count: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(count)
    flags = (torch.rand(count + offset, generator=generator) > 0.4)[offset:]
    packed = pack_bits(flags)
    assert packed.shape == (bitmap_bytes(count),)
    assert torch.equal(pack_bits_torch(flags), packed)
    assert torch.equal(unpack_bits(packed, slice(0, count)), flags)
    assert torch.equal(unpack_bits_torch(packed, count), flags)


@pytest.mark.parametrize("count", [1, 9, 64, 4099])
@pytest.mark.parametrize("two", [(0.0, 1.0), (0.0, 1.25), (-2.5, 1e-40), (3.0, 3.0)])
def test_masks_are_the_same_by_torch_ops(count: int, two: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(count)
    mask = torch.tensor(two)[(torch.rand(count, generator=generator) > 0.4).long()]
    bits = mask.view(torch.int32)
    low, high = int(bits.min()), int(bits.max())
    packed = pack_mask_torch(bits, low, high)
    assert packed is not None
    assert pack_mask_torch(torch.cat([bits, torch.tensor([7], dtype=torch.int32)]), low, high) is None
    released = torch.empty_like(bits)
    unpack_mask_torch(packed, low, low ^ high, released)
    assert torch.equal(released, bits)
    if (encoded := CODECS["mask"].encode(mask)) is not None:  # a few elements are not worth it
        assert encoded.scalars == (low, low ^ high)
        assert torch.equal(encoded.parts[0], packed)
        assert torch.equal(decode(encoded), mask)
