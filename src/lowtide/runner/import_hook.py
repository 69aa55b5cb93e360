"""Call a function after the first import of a package.

lowtide must not import torch before the script does: the script may first set environment variables that
torch reads during its import, such as OMP_NUM_THREADS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def call_after_import(package: str, callback: Callable[[], None]) -> None:
    """Call `callback` after `package` is imported, or now if `package` is already imported."""
    if package in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _ImportHook(package, callback))


class _ImportHook(MetaPathFinder):
    """Delegates to the other finders, and calls `callback` after the package's loader has run."""

    def __init__(self, package: str, callback: Callable[[], None]) -> None:
        self._package = package
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that another finder returns for the package."""
        if fullname != self._package:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: object) -> None:
        # `find_spec` may also be called without an import, so the hook stays until the module is executed.
        original = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = original  # type: ignore[attr-defined]
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._callback()

        loader.exec_module = exec_module  # type: ignore[attr-defined]
