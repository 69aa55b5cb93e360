"""Layout of a tensor in memory, and its memory as plain bytes.

Stores refuse tensors with gaps or overlaps, lazily conjugated or negated views, sparse and quantised tensors,
and tensor subclasses. Only `Geometry.empty` runs an op that a dispatch mode can observe.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .._errors import ArgumentError

Bytes = npt.NDArray[np.uint8]


class Geometry(NamedTuple):
    """Layout, dtype and device of a dense tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.size) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """Return a new uninitialized tensor of this geometry."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {tuple(self.size)}"


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return the geometry of `tensor`. Raise `ArgumentError` if stores cannot hold such a tensor."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ArgumentError(
            f"stores hold plain tensors, not {type(tensor).__name__}: keep it in memory, or put the tensor it wraps"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        layout = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise ArgumentError(f"stores hold dense tensors, not a {layout} one on {tensor.device}: keep it in memory")
    if tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
        raise ArgumentError(
            "stores do not hold lazily conjugated or negated views: "
            "put tensor.resolve_conj().resolve_neg(), or the tensor that is viewed"
        )
    size, stride = tensor.size(), tensor.stride()
    if not _dense(size, stride):
        raise ArgumentError(
            f"stores hold tensors that fill their memory, not strides {stride} for shape {tuple(size)}: "
            "put the whole storage and take the view after fetching, or put tensor.contiguous()"
        )
    return Geometry(size, stride, tensor.dtype, tensor.device)


def _dense(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order."""
    if 0 in size:
        return True
    expected = 1
    for step, length in sorted((s, n) for n, s in zip(size, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


class _Memory:
    """NumPy array interface of a tensor. The array keeps the tensor alive."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self.tensor = tensor
        self.__array_interface__: dict[str, Any] = {
            "data": (tensor.data_ptr(), False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of a dense CPU tensor as an array that shares it."""
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.asarray(_Memory(tensor, nbytes))
