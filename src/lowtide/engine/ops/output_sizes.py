"""How many bytes an op will make, known before it runs, so that there can be room for it.

Asked once for each op with arguments of these shapes: it is run on tensors without content ("meta"), which
takes no memory. Where that is not possible (the size depends on the content) a guess is made from the
arguments, and what the op then made is remembered.
"""

from __future__ import annotations

from typing import Any

import torch

from ...torch_compat import storage_key, without_modes
from .facts import OpFacts

_MOST_SIGNATURES = 100_000  # shapes that never repeat must not grow the table for ever

_known: dict[Any, tuple[int, bool]] = {}
_META = torch.device("meta")
_SETTINGS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def bytes_to_be_made(signature: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool]:
    """The bytes of new storages that this call will make, and whether that is certain."""
    known = _known.get(signature)
    if known is None:
        nbytes = _without_content(facts, args, kwargs)
        # No kernel for shapes alone, or none without content: as much as went in is a fair guess.
        guess = _bytes_of(args) + _bytes_of(list(kwargs.values()))
        known = (guess, False) if nbytes is None else (nbytes, True)
        _remember(signature, known)
    return known


def learn(signature: Any, nbytes: int) -> None:
    """Remember what a call made, where it was not known before."""
    known = _known.get(signature)
    if known is None or not known[1] or nbytes > known[0]:
        _remember(signature, (nbytes, False))


def _remember(signature: Any, known: tuple[int, bool]) -> None:
    if len(_known) >= _MOST_SIGNATURES:
        _known.clear()
    _known[signature] = known


def shapes_of(items: tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
    """Arguments as far as the sizes of results depend on them, to be looked up by; holds no memory."""
    key: list[Any] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            key.append(item.shape)
            key.append(item.dtype)
        elif type(item) is list or type(item) is tuple:
            key.append(shapes_of(item))
        else:
            # Not the thing itself where it is more than a setting: a key must hold no memory.
            key.append(item if type(item) in _SETTINGS else type(item))
    return tuple(key)


def _without_content(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
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
    """An argument without content; what shared memory still does."""
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
