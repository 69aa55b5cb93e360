"""Which modules of a model are its layers.

Given by the user as modules, a class or name patterns, or found: the repeated blocks. Finding is a
heuristic over the module tree and never a matter of correctness: it only decides what is kept.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..._errors import ArgumentError


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
    """The children of the outermost lists that repeat a class of module.

    A stage that contains such a list of blocks directly (ResNet, Swin, U-Net) is replaced by its blocks,
    which are the finer grain; a mixture of experts deeper inside a block is left alone. Where nothing
    repeats, a list of one is taken for a block that is called again and again (ALBERT).
    """
    return _outermost(root, _repeats) or _outermost(root, _is_list_of_one)


def _outermost(root: nn.Module, is_stack: Callable[[nn.Module], bool]) -> list[nn.Module]:
    if not is_stack(root):
        return [block for child in root.children() for block in _outermost(child, is_stack)]
    blocks: list[nn.Module] = []
    for child in root.children():
        inner = [block for part in child.children() if _repeats(part) for block in part.children()]
        composite = all(next(block.children(), None) is not None for block in inner)
        blocks.extend(inner if inner and composite else [child])
    return blocks


def _repeats(container: nn.Module) -> bool:
    """Whether this is a list of modules, some class of which stands there twice or more, with parameters."""
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return False
    classes = Counter(type(m) for m in container.children() if next(m.parameters(), None) is not None)
    return any(n > 1 for n in classes.values())


def _is_list_of_one(container: nn.Module) -> bool:
    return isinstance(container, nn.ModuleList) and len(container) == 1
