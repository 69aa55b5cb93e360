"""Training loops in their own processes, which run one method per command, so that steps of several can alternate."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import lowtide

from . import machine


class FailedLoopError(Exception):
    """The loop of another process raised an error."""


@dataclass(frozen=True)
class _Failure:
    """An error as text: not all errors can be sent to another process."""

    text: str


class Process:
    """An object in another process."""

    def __init__(self, make: Callable[[Any], Any], request: Any) -> None:
        """Start a process with the object `make(request)`. Both must be picklable."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, request), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, method: str) -> Any:
        """Call a method without arguments and return its result. Raises `FailedLoopError` if it raises."""
        try:
            self._connection.send(method)
            answer = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise FailedLoopError("the process died") from None
        if isinstance(answer, _Failure):
            raise FailedLoopError(answer.text)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, make: Callable[[Any], Any], request: Any) -> None:
    """Make the object in this process and call its methods, with one thread. Ends after the first error."""
    machine.use_one_thread()
    try:
        served = make(request)
        while True:
            connection.send(getattr(served, connection.recv())())
    except EOFError:  # the other process has ended
        return
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if isinstance(error, lowtide.LowtideError) else repr(error)
        connection.send(_Failure(text))
