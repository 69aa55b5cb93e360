"""Output bytes of an op, predicted before it runs, so that memory can be freed first.

Each op is run once per signature of its arguments on meta tensors, which need no memory. If this fails, because the
size depends on the content, the size is estimated from the arguments and corrected by the measured size. Elementwise
ops run once per dtypes on one element, and the size follows from the shapes.
"""

from __future__ import annotations

from typing import Any

import torch

from ...torch_compat import nbytes_of, shape_of, storage_key, without_modes
from .facts import OpFacts

_MAX_SIGNATURES = 100_000  # the table must not grow without limit if shapes never repeat

_known: dict[Any, tuple[int, bool]] = {}  # cache of facts about ops: output bytes, and whether they are certain
_META = torch.device("meta")
_SETTINGS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def output_bytes(signature: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
    """Return the bytes of new storages that this call allocates, and whether they are certain."""
    known = _known.get(signature)
    if known is None:
        nbytes = _elementwise_bytes(facts, args, kwargs)
        if nbytes is None:
            nbytes = _meta_bytes(facts, args, kwargs)
        # Without a meta kernel, assume that the outputs are as large as the inputs.
        guess = bytes_of(args) + bytes_of(list(kwargs.values()))
        known = (guess, False) if nbytes is None else (nbytes, True)
        _store(signature, known)
    return known


def correct(signature: Any, nbytes: int) -> None:
    """Store the measured output bytes of a call, if they were uncertain or larger than predicted."""
    known = _known.get(signature)
    if known is None or not known[1] or nbytes > known[0]:
        _store(signature, (nbytes, False))


def _store(signature: Any, known: tuple[int, bool]) -> None:
    if len(_known) >= _MAX_SIGNATURES:
        _known.clear()
    _known[signature] = known


def shapes_of(items: tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
    """Return the part of the arguments that determines output sizes, as a key that holds no tensors."""
    key: list[Any] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            key.append(shape_of(item))
            key.append(item.dtype)
        elif type(item) is list or type(item) is tuple:
            key.append(shapes_of(item))
        else:
            # Other objects could hold tensors, so only their type is used.
            key.append(item if type(item) in _SETTINGS else type(item))
    return tuple(key)


def makes_meta_tensors(kwargs: dict[str, Any]) -> bool:
    """Return whether these keywords ask for results on the meta device, which have no memory."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


_item_bytes: dict[Any, int | None] = {}  # cache of facts about elementwise ops: bytes of an element of the result


def _elementwise_bytes(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the bytes that an elementwise op allocates, or None if it is another op or has unusual arguments."""
    if kwargs or facts.writes or torch.Tag.pointwise not in getattr(facts.func, "tags", ()):
        return None
    key: list[Any] = [id(facts.func)]
    shapes = []
    for a in args:
        if type(a) is torch.Tensor or type(a) is torch.nn.Parameter:
            if a.layout is not torch.strided or a.is_nested or a.is_meta:
                return None
            # Tensors without dimensions take part in type promotion like numbers.
            key.append((a.dtype, a.dim() > 0))
            shapes.append(a.shape)
        elif type(a) in _SETTINGS:
            key.append(type(a))
        else:
            return None
    if not shapes:
        return None
    signature = tuple(key)
    if signature not in _item_bytes:
        one = [torch.empty((1,) * min(1, a.dim()), dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
        _item_bytes[signature] = _meta_bytes(facts, tuple(one), {})
    item_bytes = _item_bytes[signature]
    if item_bytes is None:
        return None
    count: int = torch.broadcast_shapes(*shapes).numel()  # type: ignore[no-untyped-call]
    return count * item_bytes


def _meta_bytes(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    shadows: dict[int, torch.Tensor] = {}
    try:
        with without_modes(), torch.no_grad():
            shadow_kwargs = {name: _shadow(item, shadows) for name, item in kwargs.items()}
            if "device" in shadow_kwargs:
                shadow_kwargs["device"] = _META
            out = facts.call(*[_shadow(a, shadows) for a in args], **shadow_kwargs)
            old = {storage_key(base.untyped_storage()) for base in shadows.values()}
            made: dict[int, int] = {}
            for item in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(item, torch.Tensor):
                    storage = item.untyped_storage()
                    if storage_key(storage) not in old:
                        made[storage_key(storage)] = storage.nbytes()
            return sum(made.values())
    except Exception:
        return None


def _shadow(item: Any, shadows: dict[int, torch.Tensor]) -> Any:
    """Return a meta tensor in place of a tensor. Tensors that share memory are replaced by ones that share it too."""
    if isinstance(item, torch.Tensor):
        key = storage_key(item.untyped_storage())
        base = shadows.get(key)
        if base is None:
            count = item.untyped_storage().nbytes()
            base = shadows[key] = torch.empty(count, dtype=torch.uint8, device=_META)
        view = torch.empty(0, dtype=item.dtype, device=_META)
        return view.set_(base.untyped_storage(), item.storage_offset(), item.size(), item.stride())
    if type(item) is list or type(item) is tuple:
        return [_shadow(i, shadows) for i in item]
    if isinstance(item, torch.device):
        return _META
    return None if isinstance(item, torch.Generator) else item


def bytes_of(items: Any) -> int:
    """Return the bytes of all tensors among `items`, also inside lists."""
    total = 0
    for item in items:
        if isinstance(item, torch.Tensor):
            total += nbytes_of(item)
        elif type(item) is list or type(item) is tuple:
            total += bytes_of(item)
    return total
