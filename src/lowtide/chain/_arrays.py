"""Trees of arrays: flatten, copy, measure, compare. Supports NumPy arrays, torch tensors and JAX arrays.

A tree is an array, or a dict, list, tuple, named tuple or dataclass of trees. `flatten` splits a tree into
its arrays and a skeleton; `unflatten` joins them. Copies share no memory with the original. Torch tensors
are copied detached. Objects of other types raise `ArgumentError` with their path in the tree.

Arrays are recognised by the module of their class, so this module imports neither torch nor jax.
"""

from __future__ import annotations

import copy as _copy
import dataclasses
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._errors import ArgumentError

Bytes = npt.NDArray[np.uint8]

_SCALAR_TYPES = (
    int, float, complex, str, bytes, type(None),
    np.generic, np.dtype, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


class _Placeholder:
    """The position of an array in a skeleton."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@functools.lru_cache(maxsize=256)
def _class_library(cls: Any) -> str | None:
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root == "numpy" and base.__name__ == "ndarray":
            return "numpy"
        if root == "torch" and base.__name__ == "Tensor":
            return "torch"
        if root in ("jax", "jaxlib") and base.__name__.endswith(("Array", "ArrayImpl")):
            return "jax"
    return None


def library(leaf: Any) -> str | None:
    """Return `"numpy"`, `"torch"` or `"jax"`, or None if `leaf` is no array."""
    cls: Any = type(leaf)
    return _class_library(cls)


def namespace(name: str) -> Any:
    """Return the module with the array functions of a library. The library must be imported already."""
    return sys.modules["jax.numpy" if name == "jax" else name]


def _check_array(leaf: Any, lib: str, path: str) -> Any:
    """Return `leaf`. Raise `ArgumentError` if a copy of its elements would not be a copy of the array."""
    if lib == "numpy":
        if leaf.dtype.hasobject:
            raise ArgumentError(f"{path} is an array of Python objects, which cannot be stored: pass a numeric dtype")
        if type(leaf) is not np.ndarray and not isinstance(leaf, np.memmap):
            raise ArgumentError(
                f"{path} is a {type(leaf).__name__}, a subclass of numpy.ndarray whose extra data would be lost: "
                "pass plain arrays, for a masked array its data and its mask"
            )
    elif lib == "torch" and str(leaf.layout) != "torch.strided":
        raise ArgumentError(f"{path} is a {leaf.layout} tensor: pass its indices and values as dense tensors")
    return leaf


def _map_arrays(tree: Any, visit: Callable[[Any, str], Any], path: str) -> Any:
    """Return a copy of `tree` with every array and placeholder replaced by `visit(leaf, path)`."""
    lib = library(tree)
    if lib is not None or isinstance(tree, _Placeholder):
        return visit(tree if lib is None else _check_array(tree, lib, path), path)
    if isinstance(tree, dict):
        mapping = _copy.copy(tree)  # preserves OrderedDict and defaultdict
        for key, item in tree.items():
            mapping[key] = _map_arrays(item, visit, f"{path}[{key!r}]")
        return mapping
    if isinstance(tree, list):
        items = _copy.copy(tree)
        items[:] = [_map_arrays(item, visit, f"{path}[{i}]") for i, item in enumerate(tree)]
        return items
    if isinstance(tree, tuple):
        parts = [_map_arrays(item, visit, f"{path}[{i}]") for i, item in enumerate(tree)]
        make = getattr(type(tree), "_make", type(tree))
        return make(parts)
    if isinstance(tree, _SCALAR_TYPES):
        return tree
    if dataclasses.is_dataclass(tree):
        record = _copy.copy(tree)
        for field in dataclasses.fields(tree):
            item = _map_arrays(getattr(tree, field.name), visit, f"{path}.{field.name}")
            object.__setattr__(record, field.name, item)  # also works for frozen dataclasses
        return record
    raise ArgumentError(
        f"{path} is a {type(tree).__module__}.{type(tree).__qualname__}, which cannot be copied: pass "
        "NumPy, torch or JAX arrays, numbers, or dicts, lists, tuples and dataclasses of them"
    )


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the arrays of `tree` in order, and a skeleton for `unflatten`.

    Later changes to the containers of `tree` do not affect the skeleton.
    """
    arrays: list[Any] = []

    def visit(leaf: Any, _: str) -> _Placeholder:
        arrays.append(leaf)
        return _Placeholder(len(arrays) - 1)

    return arrays, _map_arrays(tree, visit, "the value")


def unflatten(skeleton: Any, arrays: Sequence[Any]) -> Any:
    """Return the tree of `skeleton` with these arrays."""
    return _map_arrays(skeleton, lambda placeholder, _: arrays[placeholder.index], "the value")


def array_bytes(leaf: Any) -> int:
    """Return the bytes of the elements of one array."""
    return int(leaf.nbytes)


def nbytes(tree: Any) -> int:
    """Return the bytes of all arrays in a copy of `tree`. Numbers, strings and containers count as 0."""
    if library(tree) is not None:
        return array_bytes(tree)
    return sum(map(array_bytes, flatten(tree)[0]))


def copy_array(leaf: Any) -> Any:
    """Return a copy of one array, on the same device and in the same memory order."""
    lib = library(leaf)
    if lib == "numpy":
        return np.array(leaf, order="K", copy=True)
    if lib == "torch":
        return leaf.detach().clone()
    return leaf.copy()  # JAX arrays are immutable, but a jitted step with donate_argnums reuses their buffer


def copy(tree: Any) -> Any:
    """Return a copy that shares no array with `tree`."""
    arrays, skeleton = flatten(tree)
    return unflatten(skeleton, [copy_array(leaf) for leaf in arrays])


def detach(tree: Any) -> Any:
    """Return `tree` with every torch tensor detached. No array is copied."""
    return _map_arrays(tree, lambda leaf, _: leaf.detach() if library(leaf) == "torch" else leaf, "the value")


def dtype_name(leaf: Any) -> str:
    """Return the name of the dtype, such as `"float32"`, without a library prefix."""
    return str(leaf.dtype).removeprefix("torch.")


def describe(tree: Any) -> str:
    """Return dtypes and shapes for messages: `float32[3, 4]`, or each array with its path."""
    parts: list[str] = []

    def visit(leaf: Any, path: str) -> Any:
        shape = ", ".join(map(str, leaf.shape))
        parts.append(f"{path.removeprefix('the value')} {dtype_name(leaf)}[{shape}]".strip())
        return leaf

    _map_arrays(tree, visit, "the value")
    return "; ".join(parts) if parts else f"no array ({tree!r})"


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The metadata to rebuild an array from its elements in memory order."""

    library: str
    dtype: Any
    shape: tuple[int, ...]
    """Lengths of the axes, from the largest stride to the smallest."""
    axes: tuple[int, ...]
    """Index of each of these axes in the array."""
    device: Any = None
    """The torch device or the JAX sharding."""
    key_impl: Any = None
    """The implementation of a typed JAX random key."""


def to_flat(leaf: Any) -> tuple[Any, ArrayLayout]:
    """Return the elements of an array as a 1-D array in memory order, if possible a view, and its layout."""
    lib = library(leaf)
    axes = tuple(range(leaf.ndim))
    if lib == "jax":
        sharding = leaf.sharding
        impl = None
        if not isinstance(leaf.dtype, np.dtype):  # a typed random key
            random = sys.modules["jax"].random
            impl = random.key_impl(leaf)
            leaf = random.key_data(leaf)
            axes = tuple(range(leaf.ndim))
        return leaf.reshape(-1), ArrayLayout("jax", leaf.dtype, tuple(leaf.shape), axes, sharding, impl)
    strides = leaf.strides if lib == "numpy" else leaf.stride()
    axes = tuple(sorted(axes, key=lambda axis: -abs(strides[axis])))
    if lib == "numpy":
        ordered = np.ascontiguousarray(leaf.transpose(axes)) if axes else leaf
        return ordered.reshape(-1), ArrayLayout("numpy", leaf.dtype, tuple(leaf.shape[a] for a in axes), axes)
    ordered = leaf.detach().resolve_conj().resolve_neg().permute(axes).contiguous()
    return ordered.reshape(-1), ArrayLayout("torch", leaf.dtype, tuple(ordered.shape), axes, leaf.device)


def from_flat(flat: Any, layout: ArrayLayout) -> Any:
    """Return the array with the elements `flat` and this layout."""
    inverse = tuple(layout.axes.index(axis) for axis in range(len(layout.axes)))
    array = flat.reshape(layout.shape)
    if layout.library == "numpy":
        return array.transpose(inverse)
    if layout.library == "torch":
        return array.permute(inverse)
    jax = sys.modules["jax"]
    if layout.key_impl is not None:
        array = jax.random.wrap_key_data(array, impl=layout.key_impl)
    return jax.device_put(array, layout.device)


def flat_to_bytes(flat: Any) -> Bytes:
    """Return the bytes of a 1-D array in host memory, as a view if the array is there already."""
    if library(flat) == "torch":
        view: Bytes = flat.cpu().view(namespace("torch").uint8).numpy()
        return view
    return np.asarray(flat).view(np.uint8)


def flat_from_bytes(data: Bytes, layout: ArrayLayout) -> Any:
    """Return the 1-D array with these bytes. The array shares the memory of `data` if the library can."""
    if layout.library == "torch":
        return namespace("torch").from_numpy(data).view(layout.dtype).to(layout.device)
    flat = data.view(layout.dtype)
    return namespace("jax").asarray(flat) if layout.library == "jax" else flat


def digest(tree: Any) -> bytes:
    """Return an 8-byte hash of the structure, dtypes, shapes and bits of `tree`."""
    code = hashlib.blake2b(digest_size=8)

    def visit(leaf: Any, path: str) -> None:
        lib = library(leaf)
        code.update(f"{path}{lib}{dtype_name(leaf)}{tuple(leaf.shape)}".encode())
        # Hash in logical order: arrays that differ only in their strides must have the same digest.
        if lib == "numpy":
            flat = np.ascontiguousarray(leaf).reshape(-1)
        elif lib == "torch":
            flat = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        else:
            flat = to_flat(leaf)[0]
        code.update(flat_to_bytes(flat).data)

    skeleton = _map_arrays(tree, visit, "")
    code.update(repr(skeleton).encode())
    return code.digest()


def same(first: Any, second: Any) -> bool:
    """Return True if two trees have the same structure, dtypes, shapes and bits. NaN equals NaN."""
    return digest(first) == digest(second)


def as_numpy(leaf: Any) -> npt.NDArray[Any]:
    """Return one array as a NumPy array. bfloat16 becomes float32."""
    if dtype_name(leaf) == "bfloat16":
        leaf = cast(leaf, "float32")
    return np.asarray(leaf.detach().cpu().numpy() if library(leaf) == "torch" else leaf)


def cast(leaf: Any, dtype: str) -> Any:
    """Return `leaf` converted to the dtype with this name."""
    lib = library(leaf)
    target = getattr(namespace(lib or "numpy"), dtype)
    return leaf.to(target) if lib == "torch" else leaf.astype(target)
