"""Facts from op schemas."""

from __future__ import annotations

from typing import Any


def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the position and name of each argument that the schema declares as written."""
    return tuple(
        (i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


def returns_only_views(func: Any) -> bool:
    """Return whether the schema declares every result as an alias that the op does not write."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
