"""Trees of arrays: flatten, copy, measure, compare."""

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest

from lowtide import ArgumentError
from lowtide.chain import ActivationStore, _arrays

LIBRARIES = ["numpy", "torch", "jax"]


def make(library, values, dtype="float32"):
    array = np.asarray(values, dtype=dtype)
    if library == "torch":
        return pytest.importorskip("torch").from_numpy(array.copy())
    return pytest.importorskip("jax.numpy").asarray(array) if library == "jax" else array


class Pair(NamedTuple):
    u: object
    v: object


@dataclass(frozen=True)
class Frozen:
    u: object
    label: str = "x"
    made: list = field(default_factory=list, init=False)


@dataclass(slots=True)
class Slotted:
    u: object


@pytest.mark.parametrize("library", LIBRARIES)
def test_copy_preserves_container_types_and_shares_no_memory(library):
    a = make(library, [1, 2, 3])
    tree = {
        "list": [a, 1.5],
        "pair": Pair(a, (a, None)),
        "frozen": Frozen(a),
        "slotted": Slotted(u=[a]),
        "ordered": collections.OrderedDict(z=a),
        "flag": True,
    }
    twin = _arrays.copy(tree)
    assert type(twin["ordered"]) is collections.OrderedDict
    assert isinstance(twin["pair"], Pair)
    assert isinstance(twin["frozen"], Frozen)
    assert isinstance(twin["slotted"], Slotted)
    assert _arrays.same(tree, twin)
    assert _arrays.nbytes(tree) == 6 * 12
    originals, copies = _arrays.flatten(tree)[0], _arrays.flatten(twin)[0]
    assert len(originals) == 6
    assert not any(c is a for c in copies)
    if library == "numpy":
        assert not any(np.shares_memory(a, c) for c in copies)
        a[0] = 9
        assert not _arrays.same(tree, twin)


def test_skeleton_does_not_share_containers():
    tree = {"a": [np.zeros(2)]}
    _, skeleton = _arrays.flatten(tree)
    tree["a"].append(np.ones(3))
    assert len(_arrays.unflatten(skeleton, [np.zeros(2)])["a"]) == 1


def test_torch_tensors_are_copied_detached():
    torch = pytest.importorskip("torch")
    x = torch.ones(3, requires_grad=True)
    copied = _arrays.copy(x * 2)
    assert copied.grad_fn is None
    assert not copied.requires_grad


def test_jax_copy_survives_donation_of_the_original():
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(4.0)
    copied = _arrays.copy(x)
    jax.jit(lambda v: v * 2, donate_argnums=0)(x)
    assert x.is_deleted()
    assert copied.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
        np.arange(10)[::-2],
        np.broadcast_to(np.float32(3), (4, 5)),
        np.array(7.0),
        np.zeros((0, 3)),
        np.array(["ab", "c"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.array([True, False]),
    ],
)
def test_numpy_arrays_survive_a_round_trip_through_bytes(array):
    flat, layout = _arrays.to_flat(array)
    data = np.array(_arrays.flat_to_bytes(flat))
    restored = _arrays.from_flat(_arrays.flat_from_bytes(data, layout), layout)
    assert restored.dtype == array.dtype
    assert restored.shape == array.shape
    assert (restored == array).all()
    assert restored.flags.writeable
    if array.flags.f_contiguous:
        assert restored.flags.f_contiguous


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "bool", "int64", "complex64"])
def test_torch_tensors_survive_a_round_trip_through_bytes(dtype):
    torch = pytest.importorskip("torch")
    tensor = (torch.arange(24).reshape(1, 2, 3, 4) % 2).to(getattr(torch, dtype))
    tensor = tensor.to(memory_format=torch.channels_last)
    flat, layout = _arrays.to_flat(tensor)
    restored = _arrays.from_flat(_arrays.flat_from_bytes(_arrays.flat_to_bytes(flat).copy(), layout), layout)
    assert torch.equal(tensor, restored)
    assert restored.dtype == tensor.dtype
    assert restored.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_jax_bfloat16_and_random_keys_are_stored(tier):
    jax = pytest.importorskip("jax")
    state = {"x": jax.numpy.ones(5, dtype="bfloat16"), "key": jax.random.split(jax.random.key(3), 2)}
    with ActivationStore(tier=tier) as store:
        store.put(0, state)
        restored = store.get(0)
    assert restored["x"].dtype == "bfloat16"
    assert (jax.random.key_data(restored["key"]) == jax.random.key_data(state["key"])).all()
    assert float(jax.random.normal(restored["key"][1])) == float(jax.random.normal(state["key"][1]))


def test_same_compares_bits_dtypes_shapes_and_structure():
    nan = np.array([np.nan, 0.0])
    assert _arrays.same(nan, nan.copy())
    assert not _arrays.same(np.array([0.0]), np.array([-0.0]))
    assert not _arrays.same(np.zeros(2), np.zeros(2, dtype="int64"))
    assert not _arrays.same(np.zeros((2, 1)), np.zeros((1, 2)))
    assert not _arrays.same([np.zeros(2)], (np.zeros(2),))
    assert not _arrays.same({"a": np.zeros(1), "b": 1}, {"a": np.zeros(1), "b": 2})
    assert _arrays.same(np.asfortranarray(np.eye(3)), np.eye(3))


def test_describe():
    assert _arrays.describe(np.zeros((3, 4), dtype="float32")) == "float32[3, 4]"
    assert _arrays.describe({"u": np.zeros(2), "v": [np.array(1)]}) == "['u'] float64[2]; ['v'][0] int64[]"
    assert _arrays.describe(3) == "no array (3)"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "the value is a builtins.object, which cannot be copied: pass NumPy"),
        ({"a": [np.array([None])]}, r"the value\['a'\]\[0\] is an array of Python objects"),
        (
            np.ma.masked_array([1.0], [True]),
            "a MaskedArray, a subclass of numpy.ndarray whose extra data would be lost",
        ),
        ([{1, 2}], r"the value\[0\] is a builtins.set"),
    ],
)
def test_unsupported_values_raise_with_their_path(value, message):
    with pytest.raises(ArgumentError, match=message):
        _arrays.copy(value)


def test_sparse_tensors_raise():
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match=r"torch.sparse_coo tensor: pass its indices and values"):
        _arrays.copy(torch.eye(3).to_sparse())


def test_memory_map_is_copied_into_memory(tmp_path):
    mapped = np.memmap(tmp_path / "x", dtype="float32", mode="w+", shape=(4,))
    assert type(_arrays.copy(mapped)) is np.ndarray
