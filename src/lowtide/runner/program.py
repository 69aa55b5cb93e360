"""Run a script or module in the way that Python does: same names, arguments, path, exceptions and exit codes.

There are two differences. Tracebacks do not show the frames of this package. A `BudgetError` that the script does
not catch ends the process with exit code 3. This file does not import torch (see `import_hook`).
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

EXIT_FAILURE, EXIT_BUDGET, EXIT_INTERRUPTED = 1, 3, 128 + signal.SIGINT
_RUNNER_DIRECTORY = str(Path(__file__).parent) + os.sep
_LOWTIDE_DIRECTORY = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True)
class Program:
    """A script or module, and its arguments."""

    target: str
    """Path of the script, or name of the module."""
    arguments: tuple[str, ...]
    is_module: bool

    def run(self) -> None:
        """Run the program. Raise `SystemExit` if the exit code is not 0."""
        try:
            if self.is_module:
                self._execute_module()
            else:
                self._execute_script()
        except SystemExit:
            raise
        except BaseException as error:
            _print_traceback(error)
            if isinstance(error, KeyboardInterrupt):
                _exit_interrupted()
            sys.exit(EXIT_BUDGET if isinstance(error, BudgetError) else EXIT_FAILURE)

    def _execute_script(self) -> None:
        path = os.path.abspath(self.target)
        sys.argv[:] = [self.target, *self.arguments]
        _replace_first_path_entry(os.path.dirname(os.path.realpath(path)))
        main = ModuleType("__main__")
        main.__file__ = path
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        vars(main).update(__builtins__=builtins, __cached__=None)
        # Not restored after the run: threads and exit functions of the script still need __main__.
        sys.modules["__main__"] = main
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, vars(main))

    def _execute_module(self) -> None:
        sys.argv[:] = ["-m", *self.arguments]  # runpy replaces "-m" by the file of the module
        _replace_first_path_entry(os.getcwd())
        runpy.run_module(self.target, run_name="__main__", alter_sys=True)


def _replace_first_path_entry(directory: str) -> None:
    """Replace the entry that Python added to `sys.path` for lowtide by the one for the program."""
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # with these flags Python adds no entry
        sys.path[0] = directory


def _print_traceback(error: BaseException) -> None:
    """Print the traceback of `error` without lowtide's frames, through `sys.excepthook`."""
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        exception = pending.pop()
        if exception is not None and id(exception) not in visited:
            visited.add(id(exception))
            # The message of a LowtideError is complete. For other errors, frames of the engine may help.
            hidden = _LOWTIDE_DIRECTORY if isinstance(exception, LowtideError) else _RUNNER_DIRECTORY
            exception.__traceback__ = _without_frames(exception.__traceback__, hidden)
            pending += [exception.__cause__, exception.__context__]
    # Python sets these as well; scripts read them in exit functions.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)


def _without_frames(trace: TracebackType | None, directory: str) -> TracebackType | None:
    """Return the traceback without frames of files in `directory`, and without leading frames of `runpy`."""
    kept: list[TracebackType] = []
    while trace is not None:
        frame = trace.tb_frame
        is_leading_runpy = not kept and frame.f_globals is vars(runpy)
        if not is_leading_runpy and not frame.f_code.co_filename.startswith(directory):
            kept.append(trace)
        trace = trace.tb_next
    for entry, following in itertools.zip_longest(kept, kept[1:]):
        entry.tb_next = following
    return kept[0] if kept else None


def _exit_interrupted() -> NoReturn:
    """Exit as Python does after an uncaught KeyboardInterrupt: run exit functions, then die by SIGINT."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(EXIT_INTERRUPTED)  # reached on systems where the signal does not end the process
