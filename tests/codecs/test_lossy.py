"""Lossy codecs respect their error bounds for all finite inputs. NaN and infinities are restored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from lowtide.codecs import CODECS

from .tensors import from_bytes

LOSSY = [name for name, codec in CODECS.items() if not codec.exact]
ROUNDING = {torch.float16: Fraction(1, 2**11), torch.bfloat16: Fraction(1, 2**8)}

# (x, M of the tensor, M of the block of 64, dtype) -> error bound without s
BOUNDS: dict[str, Callable[[Fraction, Fraction, Fraction, torch.dtype], Fraction]] = {
    "bf16": lambda x, tensor, block, dtype: max(abs(x) / 2**8, tensor / 2**66),
    "fp16": lambda x, tensor, block, dtype: max(abs(x) / 2**11, tensor / 2**38),
    "fp8": lambda x, tensor, block, dtype: max(abs(x) / 2**4, block / 2**16),
    "int8": lambda x, tensor, block, dtype: block / 253 + block * ROUNDING.get(dtype, 0),
}


def least_positive(dtype: torch.dtype) -> Fraction:
    return Fraction(torch.finfo(dtype).smallest_normal) * Fraction(torch.finfo(dtype).eps)


def check(name: str, tensor: torch.Tensor) -> bool:
    """Check the error bound in exact arithmetic. Return whether the codec compressed the tensor."""
    codec = CODECS[name]
    encoded = codec.encode(tensor)
    if encoded is None:
        return False
    before = tensor.double().tolist()
    after = codec.decode(encoded).double().tolist()
    sizes = [Fraction(abs(x)) if math.isfinite(x) else Fraction(0) for x in before]
    largest = max(sizes)
    least = least_positive(tensor.dtype)
    for start in range(0, len(before), 64):
        block = max(sizes[start : start + 64])
        for x, y in zip(before[start : start + 64], after[start : start + 64], strict=True):
            if math.isnan(x):
                assert math.isnan(y)
            elif math.isinf(x):
                assert y == x
            else:
                assert math.isfinite(y), f"{x!r} became {y!r}"
                error = abs(Fraction(y) - Fraction(x))
                assert error <= BOUNDS[name](Fraction(x), largest, block, tensor.dtype) + least, f"{x!r} became {y!r}"
    return True


def test_every_lossy_codec_has_a_bound() -> None:
    assert list(BOUNDS) == LOSSY


@pytest.mark.parametrize("name", LOSSY)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_bounds_hold_for_any_floats(name: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64)))
    width = 32 if dtype is torch.float32 else 64
    values = data.draw(st.lists(st.floats(width=width), min_size=4, max_size=80))
    check(name, torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bounds_hold_for_random_bits_of_all_exponents(name: str, dtype: torch.dtype) -> None:
    """Random mantissas, and exponents within `spread` of `base`, from subnormal to the largest."""
    rng = np.random.default_rng(0)
    compressed = 0
    mantissa = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23, torch.float64: 52}[dtype]
    top = 2 ** (8 * dtype.itemsize - 1 - mantissa) - 1
    for base, spread in itertools.product((0, 1, top // 3, top // 2, top - 2, top - 1), (0, 3, 30, 2000)):
        exponents = np.clip(base - rng.integers(0, spread + 1, 300), 0, top - 1).astype(np.uint64)
        mantissas = rng.integers(0, 2**mantissa, 300, dtype=np.uint64)
        mantissas[rng.random(300) < 0.2] = 2**mantissa - 1  # rounds up into the next binade
        signs = rng.integers(0, 2, 300, dtype=np.uint64)
        bits = (signs << np.uint64(8 * dtype.itemsize - 1)) | (exponents << np.uint64(mantissa)) | mantissas
        raw = bits.astype(f"<u{dtype.itemsize}").tobytes()
        compressed += check(name, from_bytes(raw, dtype))
    narrower = dtype.itemsize > (2 if name in ("bf16", "fp16") else 1)
    assert compressed == (24 if narrower else 0)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bounds_hold_for_ties_and_extremes(name: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for scale in (1.0, info.max, info.smallest_normal, float(least_positive(dtype))):
        steps = [scale * (1 - k * 2.0**-p) for p in range(1, 25) for k in (0.5, 1, 1.5)]
        check(name, torch.tensor(steps + [-s for s in steps], dtype=dtype))
    assert check(name, torch.full((100,), info.max, dtype=dtype))
    assert check(name, torch.zeros(100, dtype=dtype))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_non_finite_values_do_not_affect_their_neighbours(name: str, dtype: torch.dtype) -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[[3, 70, 199]] = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=dtype)
    assert check(name, values) == (dtype.itemsize > (2 if name in ("bf16", "fp16") else 1))


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_blockwise_codecs_restore_nan_payloads(name: str) -> None:
    values = torch.randn(1000)
    values.view(torch.int32)[[5, 900]] = torch.tensor([0x7FC12345, 0x7F800001], dtype=torch.int32)
    encoded = CODECS[name].encode(values)
    assert encoded is not None
    back = CODECS[name].decode(encoded).view(torch.int32)
    assert back[[5, 900]].tolist() == [0x7FC12345, 0x7F800001]


@pytest.mark.parametrize("name", LOSSY)
def test_tensors_without_finite_values(name: str) -> None:
    for value in ("nan", "inf", "-inf"):
        check(name, torch.full((100,), float(value)))


@pytest.mark.parametrize("name", LOSSY)
def test_complex_tensors_are_compressed_as_pairs_of_floats(name: str) -> None:
    values = torch.randn(6, 40, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).t()
    codec = CODECS[name]
    encoded, parts = codec.encode(values), codec.encode(torch.view_as_real(values.t()))
    assert encoded is not None
    assert parts is not None
    back = codec.decode(encoded)
    assert back.stride() == values.stride()
    assert torch.equal(torch.view_as_real(back.t()), codec.decode(parts))


@pytest.mark.parametrize(("name", "narrow"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_values_of_the_narrow_dtype_are_restored_exactly(name: str, narrow: torch.dtype) -> None:
    values = torch.randn(5000).to(narrow).float()
    encoded = CODECS[name].encode(values)
    assert encoded is not None
    assert torch.equal(CODECS[name].decode(encoded), values)


@pytest.mark.parametrize(("name", "min_ratio"), [("bf16", 1.99), ("fp16", 1.99), ("fp8", 3.85), ("int8", 3.75)])
def test_ratios(name: str, min_ratio: float) -> None:
    encoded = CODECS[name].encode(torch.randn(10_000))
    assert encoded is not None
    assert encoded.ratio >= min_ratio
