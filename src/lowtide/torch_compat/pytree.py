"""Nested arguments and results."""

from __future__ import annotations

from typing import Any

import torch


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples, dicts and registered classes."""
    return torch.utils._pytree.tree_leaves(tree)
