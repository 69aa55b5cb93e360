"""`package.module:function`, as given on the command line; the current directory can be imported from."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from .._errors import ArgumentError
from ._failures import others_code


def import_function(spec: str) -> Callable[..., Any]:
    """The function that `spec` names."""
    module_name, colon, name = spec.partition(":")
    if module_name.endswith(".py"):
        module_name = module_name.removesuffix(".py").replace(os.sep, ".")
        raise ArgumentError(f"{spec!r} names a file: name the module, {module_name + ':' + (name or 'FUNCTION')!r}")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ArgumentError(f"{spec!r} names no function: write package.module:function, such as 'train:build'")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    with others_code(f"importing {module_name!r}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, and does not find one that it needs
            raise ArgumentError(
                f"there is no module {error.name!r}, neither in {here} nor installed: "
                "go to the directory that has it, or install it"
            ) from error
    found = getattr(module, name, None)
    if not callable(found):
        own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name}
        there = sorted(n for n, v in own.items() if callable(v))
        raise ArgumentError(
            f"the module {module_name!r} has no function {name!r}"
            + (f"; it has {', '.join(there[:12])}" if there else "; it has none at all")
        )
    function: Callable[..., Any] = found
    return function
