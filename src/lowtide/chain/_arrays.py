"""What an array is to a chain: NumPy arrays, torch tensors, JAX arrays, and containers of them.

Arrays are recognised by the module of their class, so neither torch nor jax is ever imported here. A tree
(dict, list, tuple, named tuple or dataclass, nested at will) is taken apart into its arrays and a
skeleton and put together again; copies share no memory with what they were made from. Autograd graphs are
not kept: a torch tensor is stored detached. Objects of other kinds are refused by name.
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

_PLAIN = (
    int, float, complex, str, bytes, type(None),
    np.generic, np.dtype, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType,
)  # fmt: skip


class _Hole:
    """Where in a skeleton an array belongs."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@functools.lru_cache(maxsize=256)
def _library_of(cls: Any) -> str | None:
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
    """`"numpy"`, `"torch"` or `"jax"`; None for what is no array."""
    cls: Any = type(leaf)
    return _library_of(cls)


def namespace(name: str) -> Any:
    """The module with the array functions of a library that some array has already brought in."""
    return sys.modules["jax.numpy" if name == "jax" else name]


def _checked(leaf: Any, kind: str, path: str) -> Any:
    """`leaf`, unless it is an array of a sort whose bytes are not all its own."""
    if kind == "numpy":
        if leaf.dtype.hasobject:
            raise ArgumentError(f"{path} is an array of Python objects: their bytes cannot be stored")
        if type(leaf) is not np.ndarray and not isinstance(leaf, np.memmap):
            raise ArgumentError(
                f"{path} is a {type(leaf).__name__}, a subclass of numpy.ndarray whose extras would be lost: "
                "pass plain arrays (a masked array as its data and its mask)"
            )
    elif kind == "torch" and str(leaf.layout) != "torch.strided":
        raise ArgumentError(f"{path} is a {leaf.layout} tensor: pass its indices and values as dense tensors")
    return leaf


def _walk(tree: Any, visit: Callable[[Any, str], Any], path: str) -> Any:
    """`tree` rebuilt with `visit(leaf, path)` in the place of every array and hole."""
    kind = library(tree)
    if kind is not None or isinstance(tree, _Hole):
        return visit(tree if kind is None else _checked(tree, kind, path), path)
    if isinstance(tree, dict):
        mapping = _copy.copy(tree)  # keeps OrderedDict, defaultdict and their like
        for key, item in tree.items():
            mapping[key] = _walk(item, visit, f"{path}[{key!r}]")
        return mapping
    if isinstance(tree, list):
        items = _copy.copy(tree)
        items[:] = [_walk(item, visit, f"{path}[{i}]") for i, item in enumerate(tree)]
        return items
    if isinstance(tree, tuple):
        parts = [_walk(item, visit, f"{path}[{i}]") for i, item in enumerate(tree)]
        make = getattr(type(tree), "_make", type(tree))
        return make(parts)
    if isinstance(tree, _PLAIN):
        return tree
    if dataclasses.is_dataclass(tree):
        record = _copy.copy(tree)
        for field in dataclasses.fields(tree):
            item = _walk(getattr(tree, field.name), visit, f"{path}.{field.name}")
            object.__setattr__(record, field.name, item)  # frozen ones too
        return record
    raise ArgumentError(
        f"{path} is a {type(tree).__module__}.{type(tree).__qualname__}, which a chain cannot copy: pass "
        "NumPy, torch or JAX arrays, numbers, or dicts, lists, tuples and dataclasses of them"
    )


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The arrays of `tree` in order, and a skeleton from which `unflatten` rebuilds it.

    The skeleton is a copy: later changes to the containers of `tree` do not reach it.
    """
    arrays: list[Any] = []

    def visit(leaf: Any, _: str) -> _Hole:
        arrays.append(leaf)
        return _Hole(len(arrays) - 1)

    return arrays, _walk(tree, visit, "the value")


def unflatten(skeleton: Any, arrays: Sequence[Any]) -> Any:
    """The tree of `skeleton` with these arrays."""
    return _walk(skeleton, lambda hole, _: arrays[hole.index], "the value")


def array_bytes(leaf: Any) -> int:
    """Bytes of the elements of one array."""
    return int(leaf.nbytes)


def nbytes(tree: Any) -> int:
    """Bytes that a copy of `tree` takes for its arrays. Numbers, strings and containers count nothing."""
    if library(tree) is not None:
        return array_bytes(tree)
    return sum(map(array_bytes, flatten(tree)[0]))


def copy_array(leaf: Any) -> Any:
    """One array, copied, on the device and in the memory order it had."""
    kind = library(leaf)
    if kind == "numpy":
        return np.array(leaf, order="K", copy=True)
    if kind == "torch":
        return leaf.detach().clone()
    return leaf.copy()  # JAX arrays are immutable, but a jitted step may be given the buffer to reuse


def copy(tree: Any) -> Any:
    """A copy that shares no array with `tree`."""
    arrays, skeleton = flatten(tree)
    return unflatten(skeleton, [copy_array(leaf) for leaf in arrays])


def detach(tree: Any) -> Any:
    """`tree` without autograd graphs; nothing is copied."""
    return _walk(tree, lambda leaf, _: leaf.detach() if library(leaf) == "torch" else leaf, "the value")


def dtype_name(leaf: Any) -> str:
    """`"float32"` in every library."""
    return str(leaf.dtype).removeprefix("torch.")


def describe(tree: Any) -> str:
    """What `tree` is made of, for messages: `float32[3, 4]`, or each array with its path."""
    parts: list[str] = []

    def visit(leaf: Any, path: str) -> Any:
        shape = ", ".join(map(str, leaf.shape))
        parts.append(f"{path.removeprefix('the value')} {dtype_name(leaf)}[{shape}]".strip())
        return leaf

    _walk(tree, visit, "the value")
    return "; ".join(parts) if parts else f"no array ({tree!r})"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Metadata that, with the elements in a row, rebuilds an array."""

    library: str
    dtype: Any
    shape: tuple[int, ...]
    """Of the axes in the order in which they lie in memory."""
    axes: tuple[int, ...]
    """Which axis of the array each of those is."""
    place: Any = None
    """Its torch device or JAX sharding."""
    key_impl: Any = None
    """For JAX's typed random keys, how they were made."""


def lay_out(leaf: Any) -> tuple[Any, Blueprint]:
    """The elements of an array as one row in memory order (a view where possible), and its blueprint."""
    kind = library(leaf)
    axes = tuple(range(leaf.ndim))
    if kind == "jax":
        place = leaf.sharding
        impl = None
        if not isinstance(leaf.dtype, np.dtype):  # a typed random key
            random = sys.modules["jax"].random
            impl = random.key_impl(leaf)
            leaf = random.key_data(leaf)
            axes = tuple(range(leaf.ndim))
        return leaf.reshape(-1), Blueprint("jax", leaf.dtype, tuple(leaf.shape), axes, place, impl)
    strides = leaf.strides if kind == "numpy" else leaf.stride()
    axes = tuple(sorted(axes, key=lambda axis: -abs(strides[axis])))
    if kind == "numpy":
        turned = np.ascontiguousarray(leaf.transpose(axes)) if axes else leaf
        return turned.reshape(-1), Blueprint("numpy", leaf.dtype, tuple(leaf.shape[a] for a in axes), axes)
    turned = leaf.detach().resolve_conj().resolve_neg().permute(axes).contiguous()
    return turned.reshape(-1), Blueprint("torch", leaf.dtype, tuple(turned.shape), axes, leaf.device)


def stand_up(row: Any, plan: Blueprint) -> Any:
    """The array of `plan` whose elements are `row`."""
    undo = tuple(plan.axes.index(axis) for axis in range(len(plan.axes)))
    if plan.library == "numpy":
        return row.reshape(plan.shape).transpose(undo)
    if plan.library == "torch":
        return row.reshape(plan.shape).permute(undo)
    jax = sys.modules["jax"]
    array = row.reshape(plan.shape)
    if plan.key_impl is not None:
        array = jax.random.wrap_key_data(array, impl=plan.key_impl)
    return jax.device_put(array, plan.place)


def row_bytes(row: Any) -> Bytes:
    """The bytes of a row on the host: a view, unless it lives on another device."""
    if library(row) == "torch":
        view: Bytes = row.cpu().view(namespace("torch").uint8).numpy()
        return view
    return np.asarray(row).view(np.uint8)


def row_from_bytes(data: Bytes, plan: Blueprint) -> Any:
    """The row whose bytes these are. It keeps `data` as its memory where the library can."""
    if plan.library == "torch":
        return namespace("torch").from_numpy(data).view(plan.dtype).to(plan.place)
    row = data.view(plan.dtype)
    return namespace("jax").asarray(row) if plan.library == "jax" else row


def digest(tree: Any) -> bytes:
    """Eight bytes that are the same for trees with the same structure, dtypes, shapes and bits."""
    code = hashlib.blake2b(digest_size=8)

    def visit(leaf: Any, path: str) -> None:
        code.update(f"{path}{library(leaf)}{dtype_name(leaf)}{tuple(leaf.shape)}".encode())
        # In logical order: two arrays that differ in nothing but their strides hold the same values.
        row = np.ascontiguousarray(leaf).reshape(-1) if library(leaf) == "numpy" else None
        if library(leaf) == "torch":
            row = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        code.update(row_bytes(lay_out(leaf)[0] if row is None else row).data)

    skeleton = _walk(tree, visit, "")
    code.update(repr(skeleton).encode())
    return code.digest()


def same(first: Any, second: Any) -> bool:
    """Whether two trees have the same structure, dtypes, shapes and bits (so NaN equals NaN)."""
    return digest(first) == digest(second)


def as_numpy(leaf: Any) -> npt.NDArray[Any]:
    """One array as a NumPy array; bfloat16 becomes float32."""
    if dtype_name(leaf) == "bfloat16":
        leaf = cast(leaf, "float32")
    return np.asarray(leaf.detach().cpu().numpy() if library(leaf) == "torch" else leaf)


def cast(leaf: Any, dtype: str) -> Any:
    """`leaf` in the dtype of that name of its own library."""
    kind = library(leaf)
    wanted = getattr(namespace(kind or "numpy"), dtype)
    return leaf.to(wanted) if kind == "torch" else leaf.astype(wanted)
