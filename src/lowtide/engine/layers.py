"""Which modules of a model are its layers.

Given by the user as modules, a class or name patterns, or found: the repeated blocks. Finding is a
heuristic over the module tree and never a matter of correctness: it only decides what is kept.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from .._errors import ArgumentError


def layers_of(root: nn.Module, wanted: Any = None) -> list[nn.Module]:
    """The layers of `root`: those that `wanted` names, or the repeated blocks."""
    if wanted is None:
        return repeated_blocks(root)
    if isinstance(wanted, type) and issubclass(wanted, nn.Module):
        return [m for m in root.modules() if isinstance(m, wanted)]
    if isinstance(wanted, (str, nn.Module)):
        wanted = (wanted,)
    if not isinstance(wanted, Iterable):
        raise ArgumentError(f"layers must be modules, a module class, or dotted names with *, not {wanted!r}")
    found: list[nn.Module] = []
    for item in wanted:
        if isinstance(item, nn.Module):
            found.append(item)
        elif isinstance(item, str):
            found.extend(m for name, m in root.named_modules() if fnmatch.fnmatchcase(name, item))
        else:
            raise ArgumentError(f"layers must be modules, a module class, or dotted names with *, not {item!r}")
    return found


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """The children of the outermost containers that repeat a class of module.

    A stage that is itself little more than a container of repeated blocks (ResNet, Swin, U-Net) is looked
    into, because its blocks are the finer grain; a mixture of experts deeper inside a block is not.
    """
    if not _repeats(root):
        return [block for child in root.children() for block in repeated_blocks(child)]
    blocks: list[nn.Module] = []
    for child in root.children():
        stages = [part for part in child.children() if _repeats(part)]
        blocks.extend([b for stage in stages for b in repeated_blocks(stage)] if stages else [child])
    return blocks


def _repeats(container: nn.Module) -> bool:
    """Whether this is a list of modules, some class of which stands there twice or more, with parameters."""
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return False
    classes = Counter(type(m) for m in container.children() if next(m.parameters(), None) is not None)
    return any(n > 1 for n in classes.values())
