"""The levels of forward-mode AD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.autograd import forward_ad

# The installed listeners, and the functions that are replaced. Module state, because torch has one pair of functions.
_listeners: list[Callable[[], None]] = []
_originals: list[Callable[..., Any]] = []


def in_dual_level() -> bool:
    """Return whether a level of forward-mode AD is active. Levels belong to the process, not to a thread."""
    return forward_ad._current_level >= 0


def on_dual_level(listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` whenever a level of forward-mode AD begins or ends. Return a function that undoes this.

    `dual_level` and `torch.func.jvp` both call one pair of functions, which is replaced while there are listeners.
    """
    home: Any = forward_ad
    if not _listeners:
        _originals[:] = home.enter_dual_level, home.exit_dual_level
        home.enter_dual_level, home.exit_dual_level = _enter, _exit
    _listeners.append(listener)

    def undo() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
            if not _listeners:
                home.enter_dual_level, home.exit_dual_level = _originals

    return undo


def _enter() -> int:
    level: int = _originals[0]()
    _notify()
    return level


def _exit(*, level: int | None = None) -> None:
    _originals[1](level=level)
    _notify()


def _notify() -> None:
    for listener in tuple(_listeners):
        listener()
