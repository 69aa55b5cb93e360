"""Ops and facts from their schemas."""

from __future__ import annotations

from typing import Any

import torch


def is_op(func: Any) -> bool:
    """Return whether `func` is one overload of an op, and not a higher-order op or a Python function."""
    return isinstance(func, torch._ops.OpOverload)


def is_pure(op: Any) -> bool:
    """Return whether the schema of an op declares no writes."""
    return not op._schema.is_mutable


def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the position and name of each argument that the schema declares as written."""
    return tuple(
        (i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def returns_only_views(func: Any) -> bool:
    """Return whether the schema declares every result as an alias that the op does not write."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def argument_position(func: Any, name: str) -> int | None:
    """Return the position of the argument with this name, or None if there is none."""
    return next((i for i, a in enumerate(func._schema.arguments) if a.name == name), None)
