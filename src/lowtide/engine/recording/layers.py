"""Which modules of a model are its layers.

The user names them as modules, a class or name patterns. Otherwise the repeated blocks are found by a heuristic over
the module tree. A wrong result only changes which values are kept, never the gradients.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..._errors import ArgumentError


def layers_of(root: nn.Module, wanted: Any = None) -> list[nn.Module]:
    """Return the layers of `root` that `wanted` names, by default the repeated blocks."""
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
    """Return the children of the outermost lists that repeat a class of module.

    A stage that contains such a list of blocks directly (ResNet, Swin, U-Net) is replaced by its blocks. A mixture of
    experts deeper inside a block is not. If nothing repeats, a list of one is a block that is called repeatedly
    (ALBERT).
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
    """Return whether this is a list of modules in which a class with parameters occurs at least twice."""
    if not isinstance(container, (nn.ModuleList, nn.Sequential)):
        return False
    classes = Counter(type(m) for m in container.children() if next(m.parameters(), None) is not None)
    return any(n > 1 for n in classes.values())


def _is_list_of_one(container: nn.Module) -> bool:
    return isinstance(container, nn.ModuleList) and len(container) == 1
