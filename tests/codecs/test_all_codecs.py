"""Tests that every codec must pass."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings

from lowtide import LowtideError
from lowtide.codecs import CODECS, Codec, Encoded, decode
from lowtide.codecs._base import CHUNK_ELEMENTS
from lowtide.profiling.peak_meter import PeakMeter

from .tensors import DTYPES, from_bytes, laid_out, memory, same, tensors

EXACT = [codec for codec in CODECS.values() if codec.exact]
LOSSY = [codec for codec in CODECS.values() if not codec.exact]
ALL = EXACT + LOSSY


def named(codecs: list[Codec]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("codec", codecs, ids=lambda codec: codec.name)


# For each codec, rows of n elements that it must compress.
SUITABLE: dict[str, Callable[[int], torch.Tensor]] = {
    "constant": lambda n: torch.full((n,), float("nan")),
    "mask": lambda n: (torch.arange(n) % 3 == 0).float() / 0.9,
    "narrow": lambda n: torch.arange(n) % 50257,
    "sparse": lambda n: torch.randn(n).relu(),
    "bytes": lambda n: torch.arange(n, dtype=torch.float64),
    "bf16": torch.randn,
    "fp16": torch.randn,
    "fp8": torch.randn,
    "int8": torch.randn,
}


def held_bytes(encoded: Encoded) -> int:
    """Return the bytes of the distinct storages and the numbers in the fields of `encoded`."""
    storages: dict[int, int] = {}
    numbers = 0

    def visit(part: object) -> None:
        nonlocal numbers
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, (bytes, bytearray)):
            numbers += len(part)
        elif isinstance(part, (int, float)):
            numbers += 8
        elif isinstance(part, (list, tuple)):
            for item in part:
                visit(item)

    for field in dataclasses.fields(encoded):
        if field.name not in ("codec", "geometry"):
            visit(getattr(encoded, field.name))
    return sum(storages.values()) + numbers


def encoded_by(codec: Codec, tensor: torch.Tensor) -> Encoded:
    encoded = codec.encode(tensor)
    assert encoded is not None, f"{codec.name} should compress this tensor"
    return encoded


def test_every_codec_has_a_suitable_row() -> None:
    assert SUITABLE.keys() == CODECS.keys()


@named(ALL)
def test_only_lossy_codecs_have_an_error_bound(codec: Codec) -> None:
    assert (codec.error_bound is None) == codec.exact
    assert CODECS[codec.name] is codec


@named(ALL)
def test_suitable_rows_become_smaller_and_round_trip(codec: Codec) -> None:
    for count in (1000, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 2 * CHUNK_ELEMENTS + 37):
        check_round_trip(codec, SUITABLE[codec.name](count))


def check_round_trip(codec: Codec, tensor: torch.Tensor) -> None:
    before = memory(tensor).copy()
    encoded = encoded_by(codec, tensor)
    assert encoded.nbytes == held_bytes(encoded) < tensor.nbytes
    assert encoded.ratio == tensor.nbytes / encoded.nbytes
    back = codec.decode(encoded)
    assert (memory(tensor) == before).all()
    assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    if codec.exact:
        assert same(back, tensor)
    else:
        assert torch.allclose(back, tensor, rtol=0.0625, atol=0.02)
    assert same(codec.decode(encoded), back), "decoding twice gives different results"


@named(ALL)
def test_layouts_are_restored(codec: Codec) -> None:
    channels_last = (0, 2, 3, 1)
    for order in (channels_last, (3, 2, 1, 0), (1, 0, 3, 2)):
        tensor = laid_out(SUITABLE[codec.name](4 * 3 * 16 * 16), (4, 3, 16, 16), order, offset=5)
        assert tensor.is_contiguous(memory_format=torch.channels_last) == (order == channels_last)
        back = decode(encoded_by(codec, tensor))
        assert (back.shape, back.stride()) == (tensor.shape, tensor.stride())
        assert back.untyped_storage().nbytes() == tensor.nbytes
        assert same(back, tensor) or not codec.exact


@named(ALL)
def test_stride_of_a_dimension_of_size_one_is_restored(codec: Codec) -> None:
    tensor = SUITABLE[codec.name](4096).as_strided((64, 1, 64), (64, 7, 1))
    assert encoded_by(codec, tensor).geometry.stride == (64, 7, 1)
    assert decode(encoded_by(codec, tensor)).stride() == (64, 7, 1)


@named(ALL)
def test_no_reference_to_the_tensor_is_kept(codec: Codec) -> None:
    tensor = SUITABLE[codec.name](5000)
    storage = weakref.ref(tensor.untyped_storage())
    encoded = encoded_by(codec, tensor)
    del tensor
    gc.collect()
    assert storage() is None
    for part in encoded.parts:
        assert part.untyped_storage().nbytes() == part.nbytes
        assert not part.requires_grad


@named(ALL)
def test_parameters_decode_to_plain_tensors_without_grad(codec: Codec) -> None:
    row = SUITABLE[codec.name](4096)
    parameter = torch.nn.Parameter(row, requires_grad=row.is_floating_point())
    back = decode(encoded_by(codec, parameter))
    assert not back.requires_grad
    assert type(back) is torch.Tensor
    with torch.inference_mode():
        encoded_by(codec, row)


@named(ALL)
def test_tensors_without_dense_memory_are_refused(codec: Codec) -> None:
    row = SUITABLE[codec.name](4096)

    class Subclass(torch.Tensor):
        pass

    refused = {
        "empty": row[:0],
        "with gaps": row[::2],
        "expanded": row[:1].expand(4096),
        "overlapping": row.as_strided((64, 64), (1, 1)),
        "a subclass": row.as_subclass(Subclass),
        "no data": row.to("meta"),
    }
    assert [name for name, tensor in refused.items() if codec.encode(tensor) is not None] == []
    conjugate = torch.complex(torch.ones(512), torch.zeros(512)).conj()
    assert codec.encode(conjugate) is None
    assert codec.encode(conjugate.imag) is None


@named(ALL)
def test_default_device_is_ignored(codec: Codec) -> None:
    row = SUITABLE[codec.name](4096)
    with torch.device("meta"):
        back = decode(encoded_by(codec, row))
    assert back.device == row.device
    assert same(back, row) or not codec.exact


@named(ALL)
def test_encoded_tensors_can_be_pickled(codec: Codec) -> None:
    encoded = encoded_by(codec, SUITABLE[codec.name](4096))
    assert same(decode(pickle.loads(pickle.dumps(encoded))), decode(encoded))


def test_codec_refuses_a_tensor_encoded_by_another_codec() -> None:
    encoded = encoded_by(CODECS["mask"], SUITABLE["mask"](4096))
    with pytest.raises(LowtideError, match="codec 'sparse' cannot decode a tensor encoded by 'mask'"):
        CODECS["sparse"].decode(encoded)
    with pytest.raises(LowtideError, match="unknown codec 'rot13': use 'exact'"):
        decode(dataclasses.replace(encoded, codec="rot13"))


@named(EXACT)
@given(tensor=tensors())
@settings(max_examples=120, deadline=None)
def test_exact_codecs_restore_every_bit(codec: Codec, tensor: torch.Tensor) -> None:
    before = memory(tensor).copy()
    encoded = codec.encode(tensor)
    assert (memory(tensor) == before).all()
    if encoded is not None:
        assert encoded.nbytes == held_bytes(encoded) < tensor.nbytes
        assert same(codec.decode(encoded), tensor)


@named(LOSSY)
@given(tensor=tensors())
@settings(max_examples=60, deadline=None)
def test_lossy_codecs_restore_geometry_and_refuse_other_dtypes(codec: Codec, tensor: torch.Tensor) -> None:
    before = memory(tensor).copy()
    encoded = codec.encode(tensor)
    assert (memory(tensor) == before).all()
    if encoded is not None:
        assert tensor.is_floating_point() or tensor.is_complex()
        assert encoded.nbytes == held_bytes(encoded) < tensor.nbytes
        back = codec.decode(encoded)
        assert (back.dtype, back.shape, back.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


@pytest.mark.parametrize("two", [(0, 1), (0, 255), (1, 2), (127, 128), (3, 3)])
def test_mask_compresses_two_bit_patterns_of_any_dtype(two: tuple[int, int]) -> None:
    for dtype in DTYPES:
        raw = b"".join(bytes([two[i % 5 == 0]]) * dtype.itemsize for i in range(1001))
        tensor = from_bytes(raw, dtype)
        encoded = encoded_by(CODECS["mask"], tensor)
        # 1001 bits (complex128: two per element) and two 8-byte patterns.
        assert encoded.nbytes == (251 if dtype is torch.complex128 else 126) + 16
        assert same(decode(encoded), tensor)


def test_rare_third_pattern_outside_the_sample_is_found() -> None:
    tensor = torch.zeros(2**20)
    tensor[::2] = 1
    tensor[-5000] = -0.0
    tensor[-5001] = 2
    assert CODECS["mask"].encode(tensor) is None
    flat = torch.zeros(2**20)
    flat[-5000] = -0.0
    assert CODECS["constant"].encode(flat) is None
    assert same(decode(encoded_by(CODECS["mask"], flat)), flat)
    assert encoded_by(CODECS["sparse"], flat).nbytes == 4 + 4  # one index and one element: -0.0 is not a zero
    assert same(decode(encoded_by(CODECS["sparse"], flat)), flat)


@pytest.mark.parametrize("step", [3, 100], ids=["bitmap", "indices"])
def test_sparse_restores_negative_zeros_and_subnormal_numbers(step: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        for one in (0x80, 0x01):  # only the highest or lowest bit set: -0.0 or the smallest subnormal number
            element = bytes([one] + [0] * (dtype.itemsize - 1))
            element = element[::-1] if one == 0x80 else element
            raw = b"".join(bytes(dtype.itemsize) if i % step else element for i in range(5000))
            tensor = from_bytes(raw, dtype)
            assert same(decode(encoded_by(CODECS["sparse"], tensor)), tensor)


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.int16, 8), (torch.int32, 8), (torch.int32, 16), (torch.int64, 8), (torch.int64, 16), (torch.int64, 32)],
)
def test_narrow_at_the_limits_of_each_dtype(dtype: torch.dtype, bits: int) -> None:
    info = torch.iinfo(dtype)
    narrow = CODECS["narrow"]
    reach = 2**bits
    for low in (info.min, -reach // 2, -1, 0, info.max - reach + 1):
        fits = torch.tensor([low, low + reach - 1, low + reach // 2, low] * 10, dtype=dtype)
        assert encoded_by(narrow, fits).nbytes == 40 * bits // 8 + 8
        assert same(decode(encoded_by(narrow, fits)), fits)
    if 2 * bits >= info.bits:
        assert narrow.encode(torch.tensor([0, reach] * 10, dtype=dtype)) is None
    assert narrow.encode(torch.tensor([info.min, info.max] * 10, dtype=dtype)) is None


def test_codecs_are_thread_safe() -> None:
    tensors_of = {name: make(50_000) for name, make in SUITABLE.items()}
    expected = {name: CODECS[name].decode(encoded_by(CODECS[name], row)) for name, row in tensors_of.items()}

    def round_trip(name: str) -> bool:
        return same(decode(encoded_by(CODECS[name], tensors_of[name])), expected[name])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trip, list(SUITABLE) * 10))


def test_bytes_codec_joins_several_frames() -> None:
    tensor = torch.arange(5 * 2**20, dtype=torch.int64)  # 40 MiB: three frames
    encoded = encoded_by(CODECS["bytes"], tensor)
    assert len(encoded.scalars) == 3
    assert same(decode(encoded), tensor)


@named(ALL)
def test_temporary_memory_is_small(codec: Codec) -> None:
    """Counts torch allocations. The frames of `bytes` before they are joined are not included."""
    tensor = SUITABLE[codec.name](2**23)  # 32 MiB, or 64
    with PeakMeter() as encoding:
        encoded = encoded_by(codec, tensor)
    with PeakMeter() as decoding:
        decode(encoded)
    slack = 8 * 2**20
    assert encoding.peak_bytes <= tensor.nbytes + encoded.nbytes + slack  # the meter also counts views of the input
    assert decoding.peak_bytes <= tensor.nbytes + encoded.nbytes + slack
