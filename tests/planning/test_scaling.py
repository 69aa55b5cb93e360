"""Traces of other sizes from a few profiles: functions of the sizes that are known are found exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lowtide.planning.scaling import ScaledTrace, SizedTrace, scale
from lowtide.records import Op, Trace, Unpack, Value

from .traces import make_trace

Size = Callable[..., int]

MONOMIALS: dict[str, Size] = {
    "constant": lambda b, n: 640,
    "batch": lambda b, n: 16 * b,
    "tokens": lambda b, n: 4 * b * n,
    "attention": lambda b, n: 2 * b * n * n,
}
SHAPES = {
    "stride 2": lambda h, w: (4, 8, (h + 1) // 2, (w + 1) // 2),
    "stride 32": lambda h, w: (4, 64, (h + 31) // 32, (w + 31) // 32),
    "no padding": lambda h, w: (4, 8, h - 4, w - 4),
}


def trace_of(value_bytes: list[int], other_bytes: int = 0, shapes: list[tuple[int, ...]] | None = None) -> Trace:
    """Return a trace in which each op makes one value, and each value is saved and unpacked."""
    n = len(value_bytes)
    values = tuple(
        Value(nbytes, made_at, made_at, made_at, shape=shapes[made_at] if shapes else None)
        for made_at, nbytes in enumerate(value_bytes)
    )
    ops = tuple(
        Op("op", "", 1e-6 * (1 + nbytes), (), (j,), other_bytes=other_bytes) for j, nbytes in enumerate(value_bytes)
    )
    unpacks = tuple(Unpack(j, j, other_bytes, 1e-6, rise_bytes=other_bytes // 2) for j in reversed(range(n)))
    return make_trace(ops=ops, unpacks=unpacks, values=values, saved=tuple(range(n)))


def profiled(sizes: tuple[int, ...], other: Size, bytes_before: int = 0) -> SizedTrace:
    value_bytes = [function(*sizes) for function in MONOMIALS.values()]
    return SizedTrace(sizes, trace_of(value_bytes, other(*sizes) + bytes_before), bytes_before)


def nbytes(found: ScaledTrace) -> list[int]:
    return [value.nbytes for value in found.trace.values]


sizes = st.tuples(st.integers(2, 40), st.integers(2, 600))


@settings(max_examples=200, deadline=None)
@given(st.lists(sizes, min_size=2, max_size=4, unique=True), sizes)
def test_the_true_bytes_are_within_the_uncertainty(seen: list[tuple[int, int]], wanted: tuple[int, int]) -> None:
    found = scale([profiled(s, MONOMIALS["batch"]) for s in seen], wanted, 0)
    true = [function(*wanted) for function in MONOMIALS.values()]
    assert all(scaled >= exact for scaled, exact in zip(nbytes(found), true, strict=True))
    assert sum(nbytes(found)) - sum(true) <= found.uncertain_bytes + len(true)
    found.trace.check()


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 600), st.integers(2, 600), st.integers(2, 600))
def test_two_profiles_are_enough_for_one_variable(n1: int, n2: int, wanted: int) -> None:
    if n1 == n2:
        return
    found = scale([profiled((8, n), MONOMIALS["tokens"]) for n in (n1, n2)], (8, wanted), 0)
    assert nbytes(found) == [function(8, wanted) for function in MONOMIALS.values()]


def test_profiles_with_equal_ratios_are_ambiguous_until_a_third_one() -> None:
    two = [profiled((4, 64), MONOMIALS["batch"]), profiled((8, 128), MONOMIALS["batch"])]
    wanted = (2, 300)
    ambiguous = scale(two, wanted, 0)
    assert ambiguous.uncertain_bytes > sum(function(*wanted) for function in MONOMIALS.values())
    clear = scale([*two, profiled((3, 100), MONOMIALS["batch"])], wanted, 0)
    assert nbytes(clear) == [function(*wanted) for function in MONOMIALS.values()]
    assert clear.uncertain_bytes < ambiguous.uncertain_bytes / 100  # other bytes may still have two forms


@pytest.mark.parametrize("wanted", [(8, 80), (8, 128), (8, 400)])
def test_other_bytes_are_never_too_small(wanted: tuple[int, int]) -> None:
    def other(b: int, n: int) -> int:
        return 10_000 + 8 * b * n + b * n * n

    found = scale([profiled((8, 64), other, 500), profiled((8, 128), other, 700)], wanted, 900)
    assert all(event.other_bytes >= other(*wanted) + 900 for event in found.trace.events)
    third = profiled((8, 200), other, 100)
    found = scale([profiled((8, 64), other, 500), profiled((8, 128), other, 700), third], wanted, 900)
    assert all(abs(event.other_bytes - other(*wanted) - 900) <= 1 for event in found.trace.events)


def test_profiled_sizes_give_the_profile() -> None:
    profiles = [profiled((8, n), MONOMIALS["tokens"], 100) for n in (64, 128)]
    assert scale(profiles, (8, 64), 100) == ScaledTrace(profiles[0].trace, 0)
    shifted = scale(profiles, (8, 64), 130)
    assert [e.other_bytes for e in shifted.trace.events] == [e.other_bytes + 30 for e in profiles[0].trace.events]


@pytest.mark.parametrize("form", SHAPES)
def test_images(form: str) -> None:
    """Dimensions behind strides and without padding, in range and outside."""

    def profile(h: int, w: int) -> SizedTrace:
        shape = SHAPES[form](h, w)
        return SizedTrace((3, h, w), trace_of([4 * shape[0] * shape[1] * shape[2] * shape[3]], shapes=[shape]), 0)

    profiles = [profile(*s) for s in ((97, 130), (160, 111), (201, 188), (64, 250))]
    for h, w in itertools.product((64, 121, 300), (90, 224)):
        (scaled,), (true,) = nbytes(scale(profiles, (3, h, w), 0)), nbytes_of(profile(h, w))
        rows = SHAPES[form](h, w)[2:]
        assert true <= scaled <= true * (1 + 1 / rows[0]) * (1 + 1 / rows[1])


@pytest.mark.parametrize("stride", [2, 32])
def test_sizes_that_strides_divide_do_not_hide_rounding(stride: int) -> None:
    """At 32, 64 and 128 pixels, a rounded dimension looks like an exact share of the pixels."""

    def profile(h: int, w: int) -> SizedTrace:
        shape = SHAPES[f"stride {stride}"](h, w)
        size = 4 * shape[0] * shape[1] * shape[2] * shape[3]
        return SizedTrace((3, h, w), trace_of([size], other_bytes=1000 + 3 * size, shapes=[shape]), 0)

    profiles = [profile(n, n) for n in (32, 64, 128)]
    for n in (33, 200, 333, 512):
        found, true = scale(profiles, (3, n, n), 0), profile(n, n).trace
        assert found.trace.values[0].nbytes == true.values[0].nbytes
        for scaled, exact in zip(found.trace.events, true.events, strict=True):
            assert exact.other_bytes <= scaled.other_bytes <= exact.other_bytes + 1
        assert (found.uncertain_bytes > 0) == (n % stride > 0)


def test_constant_dimensions_stay_small() -> None:
    """A size that grows by half is not taken for a dimension that grows from 1 to 1.5, rounded to 2."""

    def profile(n: int, m: int) -> SizedTrace:
        return SizedTrace((5, n, m), trace_of([n, 4 * 5 * m], 81920 * n + 8, [(1, 1, n, 1), (5, m)]), 0)

    sizes = ((146, 123), (133, 112), (192, 141), (125, 77), (190, 82), (130, 67))
    profiles = [profile(*s) for s in sizes]
    for n, m in ((192, 158), (150, 150), (300, 40)):
        found, true = scale(profiles, (5, n, m), 0), profile(n, m)
        assert nbytes(found) == nbytes_of(true)
        for event, exact in zip(found.trace.events, true.trace.events, strict=True):
            assert 0 <= event.other_bytes - exact.other_bytes <= 1
        assert found.uncertain_bytes == 0


@pytest.mark.parametrize("multiple", [8, 32])
def test_images_padded_to_a_multiple(multiple: int) -> None:
    """The largest height of a list of images is padded to a multiple, and then halved by strides."""

    def profile(first: int, second: int) -> SizedTrace:
        largest = max(first, second)
        padded = -(-largest // multiple) * multiple
        shapes = [(2, 3, padded), (2, 16, padded // 2), (2, 32, padded // 8)]
        sizes = (3, first, 3, second, 3, largest)
        return SizedTrace(sizes, trace_of([4 * b * c * h for b, c, h in shapes], shapes=shapes), 0)

    profiles = [profile(*s) for s in ((70, 90), (101, 44), (130, 165), (33, 60))]
    for first, second in ((80, 75), (20, 140), (200, 230)):
        found, true = nbytes(scale(profiles, profile(first, second).sizes, 0)), nbytes_of(profile(first, second))
        assert all(exact <= scaled <= 1.2 * exact for scaled, exact in zip(found, true, strict=True))


def nbytes_of(profile: SizedTrace) -> list[int]:
    return [value.nbytes for value in profile.trace.values]


def test_times_grow_with_bytes() -> None:
    profiles = [profiled((8, n), MONOMIALS["tokens"]) for n in (64, 128)]
    found = scale(profiles, (8, 256), 0).trace
    for small, large, scaled in zip(profiles[0].trace.ops, profiles[1].trace.ops, found.ops, strict=True):
        assert small.time_s <= large.time_s <= scaled.time_s
    assert found.step_s >= sum(event.time_s for event in found.events)


def test_noise_does_not_give_negative_times() -> None:
    small = profiled((8, 64), MONOMIALS["tokens"])
    slow = tuple(replace(event, time_s=1.0) for event in small.trace.events)
    profiles = [replace(small, trace=replace(small.trace, events=slow)), profiled((8, 128), MONOMIALS["tokens"])]
    assert all(event.time_s >= 0 for event in scale(profiles, (8, 500), 0).trace.events)
