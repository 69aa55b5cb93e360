"""Something is done when a package is imported for the first time, and not before.

A script may set what torch reads while it is imported (OMP_NUM_THREADS, for one): so lowtide must not import it
earlier than the script does. Asking whether a package is there, without importing it, changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(package: str, act: Callable[[], None]) -> None:
    """Call `act` once `package` has been imported: now, if it has."""
    if package in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Doorkeeper(package, act))


class _Doorkeeper(MetaPathFinder):
    """Finds the package as the others do, and adds to what its loader does."""

    def __init__(self, package: str, act: Callable[[], None]) -> None:
        self._package = package
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the package is."""
        if fullname != self._package:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._add_to(spec.loader)
        return spec

    def _add_to(self, loader: object) -> None:
        original = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = original  # type: ignore[attr-defined]
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._act()

        loader.exec_module = exec_module  # type: ignore[attr-defined]
