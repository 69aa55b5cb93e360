"""Narrow storage: stored sizes, error bounds, and exact values."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from lowtide import ArgumentError
from lowtide.chain import ActivationStore, _arrays
from lowtide.chain._precision import BLOCK_VALUES, compress, decompress

NARROW = ["float16", "bfloat16", "int8"]


def bound(x, precision):
    """Return the documented error bound of each value."""
    finite = np.where(np.isfinite(x), np.abs(x), 0).astype("float64")
    if precision == "int8":
        rows = [finite[i : i + BLOCK_VALUES].max(initial=0) for i in range(0, x.size, BLOCK_VALUES)]
        return np.repeat(rows, BLOCK_VALUES)[: x.size] / 253
    relative, absolute = (2.0**-11, 2.0**-39) if precision == "float16" else (2.0**-8, 2.0**-66)
    return np.maximum(relative * finite, absolute * finite.max(initial=0))


def check(x, precision):
    compressed = compress(x, precision)
    if compressed is None:
        return
    restored = decompress(compressed)
    assert restored.dtype == x.dtype
    assert restored.shape == x.shape
    finite = np.isfinite(x)
    assert np.array_equal(np.isfinite(restored), finite)
    assert np.array_equal(restored[~finite], x[~finite], equal_nan=True)
    tiny = float(np.finfo(x.dtype).tiny)
    with np.errstate(over="ignore"):
        error = np.abs(restored[finite].astype("longdouble") - x[finite].astype("longdouble"))
    allowed = np.maximum(bound(x, precision)[finite], tiny)
    assert (error <= allowed).all(), (x[finite][error > allowed], restored[finite][error > allowed])


floats = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65519.9, 65520.0, 3.4028235e38, 1e-45, 2.0**-24]),
)


@settings(max_examples=150, deadline=None)
@given(x=hnp.arrays("float32", st.integers(1, 150), elements=floats), precision=st.sampled_from(NARROW))
def test_error_bounds_for_float32(x, precision):
    check(x, precision)


@settings(max_examples=150, deadline=None)
@given(x=hnp.arrays("float64", st.integers(1, 150), elements=st.floats()), precision=st.sampled_from(NARROW))
def test_error_bounds_for_float64(x, precision):
    check(x, precision)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_error_bounds_for_all_magnitudes_over_several_chunks(precision, scale):
    check(np.random.default_rng(0).standard_normal(600_000) * scale, precision)


@pytest.mark.parametrize(("library", "rounds"), [("torch", 60), ("jax", 4)])
@pytest.mark.parametrize("precision", NARROW)
def test_error_bounds_in_torch_and_jax(library, rounds, precision):
    """XLA flushes subnormals to zero, so an error of twice the smallest normal number is allowed."""
    convert = (
        pytest.importorskip("torch").from_numpy if library == "torch" else pytest.importorskip("jax.numpy").asarray
    )
    rng = np.random.default_rng(5)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.9, 65520, 3.4028235e38, 1e-45, 2.0**-24, 1e38, 2.0**127]
    for _ in range(rounds):
        bits = rng.integers(0, 2**32, 150, dtype="uint64").astype("uint32").view("float32")
        scaled = rng.standard_normal(150).astype("float32") * np.float32(10.0 ** rng.integers(-37, 38))
        for x in (bits, scaled, rng.choice(edges, 150).astype("float32")):
            compressed = compress(convert(x.copy()), precision)
            if compressed is None:
                continue
            restored, finite = _arrays.as_numpy(decompress(compressed)), np.isfinite(x)
            assert np.array_equal(restored[~finite], x[~finite], equal_nan=True)
            assert np.isfinite(restored[finite]).all()
            error = np.abs(restored[finite].astype("float64") - x[finite].astype("float64"))
            assert (error <= np.maximum(bound(x, precision)[finite], 2 * np.finfo("float32").tiny)).all()


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_values_of_the_narrow_dtype_are_exact(precision):
    bits = np.arange(2**16, dtype="uint16")
    if precision == "float16":
        every = bits.view("float16").astype("float32")
    else:
        every = (bits.astype("uint32") << 16).view("float32")
        every = every[~(np.abs(every) > 2.0**127)]  # larger values are scaled first
    assert np.array_equal(decompress(compress(every, precision)), every, equal_nan=True)


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("dtype", ["int64", "int8", "bool", "uint16", "<U3"])
def test_other_dtypes_are_exact(precision, dtype):
    x = np.arange(300).astype(dtype)
    store = ActivationStore(precision=precision)
    store.put(0, {"x": x, "number": 0.1, "scalar": np.float32(0.1)})
    restored = store.get(0)
    assert (restored["x"] == x).all()
    assert restored["number"] == 0.1
    assert restored["scalar"] == np.float32(0.1)
    assert store.bytes_avoided == 0


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize(("precision", "ratio"), [("float16", 1 / 2), ("bfloat16", 1 / 2), ("int8", 17 / 64)])
def test_stored_bytes_and_restored_dtype(library, tier, precision, ratio):
    values = np.random.default_rng(1).standard_normal((64, 128)).astype("float32")
    values[3, 5] = np.nan
    x = values
    if library == "torch":
        x = pytest.importorskip("torch").from_numpy(values.copy())
    elif library == "jax":
        x = pytest.importorskip("jax.numpy").asarray(values)
    with ActivationStore(precision=precision, tier=tier) as store:
        store.put("x", x)
        nan_bytes = 16 if precision == "int8" else 0
        assert store.bytes_stored <= ratio * values.nbytes + nan_bytes
        assert store.bytes_avoided == values.nbytes - store.bytes_stored
        if tier == "disk":
            assert store.scratch.file_bytes == store.bytes_stored
        restored = store.get("x")
    assert type(restored) is type(x)
    assert restored.dtype == x.dtype
    as_numpy = _arrays.as_numpy(restored)
    assert np.isnan(as_numpy[3, 5])
    flat = values.reshape(-1)
    error = np.abs(as_numpy.reshape(-1) - flat)
    assert (np.nan_to_num(error) <= bound(flat, precision)).all()
    assert np.nanmax(error) > 0


def test_libraries_round_equally():
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    x = np.random.default_rng(2).standard_normal(1000).astype("float32")
    for precision in NARROW:
        numpy_restored = decompress(compress(x, precision))
        assert np.array_equal(decompress(compress(torch.from_numpy(x), precision)).numpy(), numpy_restored)
        assert np.allclose(
            np.asarray(decompress(compress(jnp.asarray(x), precision))), numpy_restored, rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("precision", NARROW)
def test_complex_fortran_order_and_half_precision_inputs(precision):
    rng = np.random.default_rng(3)
    z = (rng.standard_normal((20, 30)) + 1j * rng.standard_normal((20, 30))).astype("complex64")
    z[0, 0] = complex(np.inf, 1)
    restored = decompress(compress(z, precision))
    assert restored[0, 0].real == np.inf
    assert restored[0, 0].imag == pytest.approx(1, abs=0.05)
    assert np.abs(restored[1:] - z[1:]).max() < 0.05
    fortran = decompress(compress(np.asfortranarray(rng.standard_normal((20, 30))), precision))
    assert fortran.flags.f_contiguous
    half = rng.standard_normal(1000).astype("float16")
    compressed = compress(half, precision)
    assert (compressed is None) == (precision != "int8")
    if compressed is not None:
        assert decompress(compressed).dtype == np.float16


def test_arrays_that_would_not_become_smaller_stay_exact():
    mask = np.where(np.arange(200) % 2, -np.inf, 0).astype("float32")
    assert compress(mask, "int8") is None
    assert compress(np.float32([1.0]), "int8") is None
    assert compress(np.zeros((0, 4)), "float16") is None


def test_compression_needs_little_memory_beside_its_result():
    import tracemalloc

    x = np.random.default_rng(4).standard_normal(4_000_000)
    for precision, result in (("float16", x.nbytes / 4), ("bfloat16", x.nbytes / 4), ("int8", 2 * x.nbytes * 9 / 64)):
        tracemalloc.start()
        compress(x, precision)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < result + 16 * 2**20


def test_unknown_precision():
    with pytest.raises(ArgumentError, match="precision is one of 'exact', 'float16', 'bfloat16', 'int8', not 'fp8'"):
        ActivationStore(precision="fp8")
