"""Output bytes of an op, predicted before it runs, so that memory can be freed first.

Each op is run once per signature of its arguments on meta tensors, which need no memory. If this fails, because the
size depends on the content, the size is estimated from the arguments and corrected by the measured size.
"""

from __future__ import annotations

from typing import Any

import torch

from ...torch_compat import storage_key, without_modes
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
        nbytes = _meta_bytes(facts, args, kwargs)
        # Without a meta kernel, assume that the outputs are as large as the inputs.
        guess = _bytes_of(args) + _bytes_of(list(kwargs.values()))
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
            key.append(item.shape)
            key.append(item.dtype)
        elif type(item) is list or type(item) is tuple:
            key.append(shapes_of(item))
        else:
            # Other objects could hold tensors, so only their type is used.
            key.append(item if type(item) in _SETTINGS else type(item))
    return tuple(key)


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


def _bytes_of(items: Any) -> int:
    total = 0
    for item in items:
        if isinstance(item, torch.Tensor):
            total += item.numel() * item.itemsize
        elif type(item) is list or type(item) is tuple:
            total += _bytes_of(item)
    return total
