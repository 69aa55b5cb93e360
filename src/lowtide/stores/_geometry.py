"""How a tensor lies in memory, and its memory as plain bytes.

A `Geometry` is enough to make a tensor of the same dtype, shape, strides and device again, in memory of
exactly the value's size. Tensors with gaps, with overlaps, of lazy sign, or that are no plain memory at all are
refused with a sentence. Nothing here runs an op that a dispatch mode would see, except making the new tensor.
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
    """What is needed to make a tensor like another one."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """How many bytes of memory it takes, which are all its own."""
        return math.prod(self.size) * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """A new tensor of this geometry."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} of shape {tuple(self.size)}"


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The geometry of a tensor that a store can take."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise ArgumentError(
            f"a store takes plain tensors, not {type(tensor).__name__}: keep it, or store what it wraps"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise ArgumentError(f"a store takes dense tensors in memory, not a {kind} one on {tensor.device}: keep it")
    if tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj()):
        raise ArgumentError(
            "a store takes what is in memory, not a lazy conjugate or negative of it: "
            "put tensor.resolve_conj().resolve_neg(), or the tensor below"
        )
    size, stride = tensor.size(), tensor.stride()
    if not _dense(size, stride):
        raise ArgumentError(
            f"a store takes tensors that fill their memory, not strides {stride} for shape {tuple(size)}: "
            "put the whole storage and take the view again after fetching, or put tensor.contiguous()"
        )
    return Geometry(size, stride, tensor.dtype, tensor.device)


def _dense(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether every element between the first and the last is there once."""
    if 0 in size:
        return True
    expected = 1
    for step, length in sorted((s, n) for n, s in zip(size, stride, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= length
    return True


class _Memory:
    """A tensor's memory for NumPy, which holds the tensor for as long as the array lives."""

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
    """The memory of a dense CPU tensor, shared: writing to one writes to the other."""
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.asarray(_Memory(tensor, nbytes))
