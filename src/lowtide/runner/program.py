"""A script or module, run as Python itself runs it: its names, arguments, path, exceptions and exit code.

The differences that remain: frames of this room are not in the tracebacks that end the program, and a budget that
could not be held ends it with exit code 3. Imports no torch, so that what a script sets before it does so counts.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
import itertools
import os
import runpy
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from .._errors import BudgetError, LowtideError

FAILED, TOO_SMALL, INTERRUPTED = 1, 3, 128 + signal.SIGINT
_ROOM = str(Path(__file__).parent) + os.sep
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True)
class Program:
    """A script's path, or a module's name, and its arguments."""

    target: str
    arguments: tuple[str, ...]
    is_module: bool

    def run(self) -> None:
        """Run it to its end; raises `SystemExit` where Python would not end with exit code 0."""
        try:
            if self.is_module:
                self._execute_module()
            else:
                self._execute_script()
        except SystemExit:
            raise
        except BaseException as error:
            _show(error)
            if isinstance(error, KeyboardInterrupt):
                _end_as_interrupted()
            sys.exit(TOO_SMALL if isinstance(error, BudgetError) else FAILED)

    def _execute_script(self) -> None:
        path = os.path.abspath(self.target)
        sys.argv[:] = [self.target, *self.arguments]
        _put_first_on_path(os.path.dirname(os.path.realpath(path)))
        main = ModuleType("__main__")
        main.__file__ = path
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        vars(main).update(__builtins__=builtins, __cached__=None)
        # It stays there, as Python's own does: threads and exit functions of the script still need it.
        sys.modules["__main__"] = main
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, vars(main))

    def _execute_module(self) -> None:
        sys.argv[:] = ["-m", *self.arguments]  # until the module is found, then its file
        _put_first_on_path(os.getcwd())
        runpy.run_module(self.target, run_name="__main__", alter_sys=True)


def _put_first_on_path(directory: str) -> None:
    """Where Python has put the place of the program that it started: lowtide's, which the script has no use for."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # else it has put nothing there
        sys.path[0] = directory


def _show(error: BaseException) -> None:
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _without_our_frames(one.__traceback__, isinstance(one, LowtideError))
            pending += [one.__cause__, one.__context__]
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # as Python does
    sys.excepthook(type(error), error, error.__traceback__)


def _without_our_frames(trace: TracebackType | None, all_of_them: bool) -> TracebackType | None:
    """The frames of the program and what it called; those of the engine too, unless its error says everything."""
    ours = _PACKAGE if all_of_them else _ROOM
    kept: list[TracebackType] = []
    while trace is not None:
        frame = trace.tb_frame
        starts_it = not kept and frame.f_globals is vars(runpy)
        if not starts_it and not frame.f_code.co_filename.startswith(ours):
            kept.append(trace)
        trace = trace.tb_next
    for one, following in itertools.zip_longest(kept, kept[1:]):
        one.tb_next = following
    return kept[0] if kept else None


def _end_as_interrupted() -> NoReturn:
    """As Python ends when nobody has caught an interrupt: exit functions run, then the signal itself ends it."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(INTERRUPTED)  # where signals do not end programs
