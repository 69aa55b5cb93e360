"""Import a function that is given as `package.module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from .._errors import ArgumentError
from ._failures import user_code

_MAX_SUGGESTIONS = 12


def import_function(spec: str) -> Callable[..., Any]:
    """Return the function that `spec` names. Modules in the current directory can be imported.

    Raises `ArgumentError` if there is no such function, and `Failure` if the import itself raises.
    """
    module_name, colon, name = spec.partition(":")
    if module_name.endswith(".py"):
        module_name = module_name.removesuffix(".py").replace(os.sep, ".")
        raise ArgumentError(f"{spec!r} names a file: name the module, {module_name + ':' + (name or 'FUNCTION')!r}")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ArgumentError(f"{spec!r} names no function: write package.module:function, such as 'train:build'")
    directory = os.getcwd()
    if directory not in sys.path:
        sys.path.insert(0, directory)
    with user_code(f"importing {module_name!r}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists, but one of its own imports is missing
            raise ArgumentError(
                f"there is no module {error.name!r} in {directory}, and none is installed: "
                "change to the directory of the module, or install it"
            ) from error
    function = getattr(module, name, None)
    if not callable(function):
        own = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name}
        names = sorted(n for n, v in own.items() if callable(v))[:_MAX_SUGGESTIONS]
        raise ArgumentError(
            f"the module {module_name!r} has no function {name!r}; its functions: {', '.join(names) or 'none'}"
        )
    found: Callable[..., Any] = function
    return found
