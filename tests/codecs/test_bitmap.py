"""Bools, eight to a byte: NumPy's way, which a CPU takes, and that of torch ops, which other devices take, are one."""

import pytest
import torch

from lowtide.codecs._bitmap import gathered, pack_bits, packed_length, spread, unpack_bits


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000, 4099])
@pytest.mark.parametrize("offset", [0, 3])
def test_both_ways_agree_and_give_back_what_they_were_given(count: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(count)
    flags = (torch.rand(count + offset, generator=generator) > 0.4)[offset:]
    packed = pack_bits(flags)
    assert packed.shape == (packed_length(count),)
    assert torch.equal(gathered(flags), packed)
    assert torch.equal(unpack_bits(packed, slice(0, count)), flags)
    assert torch.equal(spread(packed, count), flags)
