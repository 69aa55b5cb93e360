"""The chooser selects the expected codec, applies its thresholds and remembers measurements."""

from __future__ import annotations

import pytest
import torch

from lowtide.codecs import CODECS, Chooser, Encoded, choose, decode, measure, resolve
from lowtide.codecs.chooser import MAX_CATEGORIES, MAX_FAILURES, MIN_RATIO, MIN_SAVED_BYTES, RETRY_AFTER
from lowtide.codecs.narrow import Narrow

from .tensors import same

N = 2**18


def noise(count: int = N) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


CASES = {
    "a bool mask": (lambda: noise() > 0, "exact", "mask"),
    "a scaled dropout mask": (lambda: (noise() > 0) / 0.9, "exact", "mask"),
    "ones": (lambda: torch.ones(512, 512), "exact", "constant"),
    "zeros": (lambda: torch.zeros(512, 512), "constant", "constant"),
    "zeros, constant not allowed": (lambda: torch.zeros(512, 512), "sparse", "sparse"),
    "token ids": (lambda: torch.arange(N) * 31337 % 50257, ("constant", "mask", "narrow", "sparse"), "narrow"),
    "the output of a ReLU": (lambda: noise().relu(), "exact", "sparse"),
    "noise": (noise, ("constant", "mask", "narrow", "sparse"), None),
    "noise of all bits": (lambda: torch.randint(-(2**63), 2**63 - 1, (N,)), "exact", None),
    "float32 activations": (noise, "exact", None),  # ratio 1.19, below MIN_RATIO
    "bfloat16 activations": (lambda: noise().bfloat16(), "exact", "bytes"),
    "activations, bf16 allowed": (noise, "bf16", "bf16"),
    "activations, bf16 and int8 allowed": (noise, ("bf16", "int8"), "int8"),
    "a mask, int8 allowed": (lambda: (noise() > 0) / 0.9, "int8", "mask"),
    "the output of a ReLU, bf16 allowed": (lambda: noise().relu(), "bf16", "sparse"),
    "the output of a ReLU, int8 allowed": (lambda: noise().relu(), "int8", "int8"),
    "small": (lambda: torch.ones(1000), "exact", None),
    "no codec allowed": (lambda: torch.ones(N), None, None),
    "with gaps": (lambda: torch.ones(N)[::2], "exact", None),
}


@pytest.mark.parametrize("case", CASES)
def test_selects_the_expected_codec(case: str) -> None:
    make, allowed, expected = CASES[case]
    tensor = make()
    # No speed limit: the machine may be busy.
    chooser = Chooser(resolve(allowed), min_bytes_per_second=0)
    codec = chooser.choose(tensor, key=case)
    assert (codec.name if codec else None) == expected
    encoded = chooser.encode(tensor, key=case)
    assert (encoded.codec if encoded else None) == expected
    if encoded is not None:
        assert encoded.ratio >= MIN_RATIO
        assert tensor.nbytes - encoded.nbytes >= MIN_SAVED_BYTES
        if CODECS[encoded.codec].exact:
            assert same(decode(encoded), tensor)


def test_zeros_compress_to_at_most_one_number() -> None:
    zeros = torch.zeros(512, 512)
    encoded = Chooser(resolve("exact"), min_bytes_per_second=0).encode(zeros)
    assert encoded is not None
    assert zeros.nbytes / 8 <= encoded.ratio <= zeros.nbytes
    assert same(decode(encoded), zeros)


def test_choose_shares_measurements_in_the_process() -> None:
    codec = choose(noise() > 0, "exact", key="the plain call")
    assert codec is CODECS["mask"]
    assert choose(noise() > 1, key="the plain call") is codec
    assert choose(noise(), key="the plain call") is None


def test_thresholds() -> None:
    half = noise().relu()  # sparse has ratio 1.88 and saves 490 kB
    sparse = resolve("sparse")
    assert Chooser(sparse, min_ratio=1.8, min_bytes_per_second=0).choose(half) is not None
    assert Chooser(sparse, min_ratio=2.0, min_bytes_per_second=0).choose(half) is None
    assert Chooser(sparse, min_saved_bytes=400_000, min_bytes_per_second=0).choose(half) is not None
    assert Chooser(sparse, min_saved_bytes=600_000, min_bytes_per_second=0).choose(half) is None
    assert Chooser(sparse, min_bytes_per_second=1e15).choose(half) is None


class CountingNarrow(Narrow):
    """Counts the calls with more than a small sample."""

    def __init__(self) -> None:
        self.large = 0

    def encode(self, tensor: torch.Tensor) -> Encoded | None:
        self.large += tensor.numel() > 2**15
        return super().encode(tensor)


def ids() -> torch.Tensor:
    return torch.arange(1, N + 1) * 31337 % 50257


def wide() -> torch.Tensor:
    """Return integers of the same category with a large range."""
    return ids() * 2**40 + 1


def test_category_is_measured_once() -> None:
    codec = CountingNarrow()
    chooser = Chooser([codec], min_bytes_per_second=0)
    chooser.choose(ids(), key="argmax")
    measured = codec.large
    assert measured > 0
    for _ in range(10):
        assert chooser.choose(ids(), key="argmax") is codec
    assert codec.large == measured
    chooser.choose(ids(), key="embedding")  # another key, another category
    assert codec.large == 2 * measured
    chooser.choose(ids().int(), key="embedding")  # another dtype
    chooser.choose(torch.cat([ids()] * 4), key="embedding")  # another size
    assert len(chooser) == 4


def test_category_without_usable_codec_is_not_timed_and_is_retried() -> None:
    codec = CountingNarrow()
    chooser = Chooser([codec], min_bytes_per_second=0)
    for _ in range(RETRY_AFTER - 1):
        assert chooser.choose(wide()) is None
    assert codec.large == 0
    assert chooser.choose(ids()) is None
    assert chooser.choose(ids()) is codec


def test_category_usable_after_many_retries_has_the_normal_failure_limit() -> None:
    chooser = Chooser(resolve("narrow"), min_bytes_per_second=0)
    for _ in range(4 * RETRY_AFTER + 1):
        chooser.encode(wide())
    while chooser.encode(ids()) is None:
        pass
    for _ in range(2 * MAX_FAILURES):
        assert chooser.encode(wide()) is None
    assert chooser.measurements(wide()) == ()


def test_category_whose_content_changes_is_measured_again() -> None:
    chooser = Chooser(resolve("narrow"), min_bytes_per_second=0)
    assert chooser.encode(ids()) is not None
    for _ in range(MAX_FAILURES):
        assert [one.codec.name for one in chooser.measurements(wide())] == ["narrow"]
        assert chooser.encode(wide()) is None
    assert chooser.measurements(wide()) == ()


def test_category_with_mixed_content_is_measured_less_and_less_often() -> None:
    codec = CountingNarrow()
    chooser = Chooser([codec], min_bytes_per_second=0)
    measured = []
    for number in range(100):
        before = codec.large
        chooser.choose(ids() if number % 8 == 0 else wide())
        measured.append(codec.large > before)
    assert measured[0]
    assert sum(measured) <= 6


def test_masks_and_activations_of_one_op_are_separate_categories() -> None:
    chooser = Chooser(resolve("exact"), min_bytes_per_second=0)
    mask = (noise() > 0) / 0.9
    for _ in range(3):
        assert chooser.choose(noise(), key="mul") is None
        assert chooser.choose(mask, key="mul") is CODECS["mask"]
        assert chooser.choose(noise().relu(), key="mul") is CODECS["sparse"]
        assert chooser.choose(torch.ones(N), key="mul") is CODECS["constant"]
    assert len(chooser) == 4


def test_number_of_categories_is_limited() -> None:
    chooser = Chooser(resolve("constant"), max_categories=4, min_bytes_per_second=0)
    for key in range(10):
        assert chooser.choose(torch.ones(N), key=key) is not None
    assert len(chooser) == 4
    assert MAX_CATEGORIES < 10_000


def test_misleading_sample_stays_exact() -> None:
    tensor = torch.ones(2**20)
    tensor[300_001] = 2.0
    tensor[300_003] = 3.0
    chooser = Chooser(resolve("exact"), min_bytes_per_second=0)
    assert chooser.choose(tensor) is CODECS["constant"]
    encoded = chooser.encode(tensor)
    assert encoded is not None
    assert encoded.codec == "bytes"
    assert same(decode(encoded), tensor)
    only = Chooser(resolve(("constant", "mask")), min_bytes_per_second=0)
    assert only.encode(tensor) is None


def test_measurements() -> None:
    mask = noise() > 0
    found = measure(CODECS["mask"], mask)
    assert found is not None
    assert found.ratio == N / (N // 8 + 16)
    assert 0 < found.round_trip_bytes_per_second < min(found.encode_bytes_per_second, found.decode_bytes_per_second)
    assert measure(CODECS["narrow"], mask) is None
    chooser = Chooser(resolve("exact"), min_bytes_per_second=0)
    # mask: 1/8. bytes: slightly more, as Zstandard does not reach the entropy. sparse: 1/8 bitmap + 1/2 nonzero.
    assert [one.codec.name for one in chooser.measurements(mask)] == ["mask", "bytes", "sparse"]
    assert chooser.measurements(mask[:100]) == ()
