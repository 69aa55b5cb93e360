"""Views of values: a geometry over the memory of a value."""

from __future__ import annotations

import torch

from ..._errors import ReplayMismatchError
from ...torch_compat import negated_view
from .value import Tensor, Value


class Ref:
    """A view of a value: an argument of an op, or a tensor that autograd saved."""

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "stride", "value")

    def __init__(self, value: Value, tensor: Tensor) -> None:
        self.value = value
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        dtype = self.dtype = tensor.dtype
        self.neg = tensor.is_neg()
        self.conj = dtype.is_complex and tensor.is_conj()

    @property
    def is_part(self) -> bool:
        """Whether this view leaves out some of the value's memory."""
        return self.size.numel() * self.dtype.itemsize < self.value.nbytes

    def is_whole(self, base: Tensor) -> bool:
        """Return whether this view has the geometry of `base`."""
        return (
            base.dtype is self.dtype
            and base.size() == self.size
            and base.stride() == self.stride
            and base.storage_offset() == self.offset
            and base.is_neg() == self.neg
            and (not self.dtype.is_complex or base.is_conj() == self.conj)
        )

    def over(self, base: Tensor) -> Tensor:
        """Return this view of `base`, which holds the value's content. Call it below autograd."""
        return base if self.is_whole(base) else self.view(base)

    def view(self, base: Tensor) -> Tensor:
        """Return a new tensor with this geometry over the memory of `base`."""
        if base.dtype is self.dtype and not (base.is_neg() or base.is_conj() or base.is_quantized):
            try:  # six times as fast as a new tensor
                tensor = base.as_strided(self.size, self.stride, self.offset)
            except RuntimeError as error:
                raise _does_not_fit(self.size, self.stride, self.offset, base.untyped_storage().nbytes()) from error
        else:
            tensor = view_of(base, self.dtype, self.size, self.stride, self.offset)
        if self.conj:
            tensor = torch.conj(tensor)
        if self.neg:
            tensor = negated_view(tensor)
        return tensor


def view_of(
    base: Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt
) -> Tensor:
    """Return a tensor of this geometry over `base`'s storage.

    Raises `ReplayMismatchError` if the storage is too small. `Tensor.set_` would grow the storage instead.
    """
    if base.is_quantized:
        raise ReplayMismatchError(
            "a view of a quantised tensor cannot be made from its bytes: keep the ops that use it"
        )
    storage = base.untyped_storage()
    if 0 not in size:  # an empty view may have any offset
        last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.nbytes():
            raise _does_not_fit(size, stride, offset, storage.nbytes())
    return torch.empty(0, dtype=dtype, device=base.device).set_(storage, offset, size, stride)


def _does_not_fit(
    size: torch.Size, stride: tuple[int, ...], offset: int | torch.SymInt, nbytes: int
) -> ReplayMismatchError:
    return ReplayMismatchError(
        f"a view of {tuple(size)} with strides {stride} at offset {offset} does not fit into {nbytes} bytes: its "
        f"storage was freed or replaced since forward"
    )


def are_disjoint(ref: Ref, tensor: Tensor) -> bool:
    """Return whether a view shares no element with `tensor`, a view of the same storage. False if it is not known.

    The strides of both views, from large to small, are the weights of the digits of an offset. If no digit of a view
    carries, its elements are a box in the digits, and two boxes are disjoint if they are in one digit.
    """
    if ref.dtype.itemsize != tensor.itemsize:
        return False
    steps = {1, *_steps(ref.size, ref.stride), *_steps(tensor.size(), tensor.stride())}
    weights = sorted(steps - {0}, reverse=True)
    one = _box(ref.size, ref.stride, int(ref.offset), weights)
    other = _box(tensor.size(), tensor.stride(), int(tensor.storage_offset()), weights)
    if one is None or other is None:
        return False
    return any(a.stop <= b.start or b.stop <= a.start for a, b in zip(one, other, strict=True))


def _steps(size: torch.Size, stride: tuple[int, ...]) -> list[int]:
    return [step for n, step in zip(size, stride, strict=True) if n > 1]


def _box(size: torch.Size, stride: tuple[int, ...], offset: int, weights: list[int]) -> list[range] | None:
    """Return the digits of a view's elements by weight. None: a digit carries, or elements overlap."""
    steps = _steps(size, stride)
    if 0 in size or 0 in steps or len(set(steps)) < len(steps):
        return None
    counts = {step: n for n, step in zip(size, stride, strict=True) if n > 1}
    box = []
    limit = None
    for weight in weights:
        first, offset = divmod(offset, weight)
        digits = range(first, first + counts.get(weight, 1))
        if limit is not None and digits.stop * weight > limit:
            return None
        box.append(digits)
        limit = weight
    return box


def flat(tensor: Tensor) -> Tensor:
    """Return the whole storage of `tensor` as one row of elements."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj()):
        return tensor.detach().view(-1)
    dtype = tensor.dtype if storage.nbytes() % tensor.itemsize == 0 else torch.uint8
    return view_of(tensor, dtype, torch.Size((storage.nbytes() // dtype.itemsize,)), (1,), 0)


def copy_of_storage(tensor: Tensor) -> Tensor:
    """Return a copy of all bytes of the storage of `tensor`."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).clone()
