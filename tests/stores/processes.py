"""Runs scripts in separate processes without importing torch each time.

A server process imports torch and forks for each script. Each script runs like a program, including interpreter
shutdown. Run as a module, this file is the server: it reads one JSON line with the code and its arguments, and
writes one JSON line with the result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import IO, NamedTuple, NoReturn


class Result(NamedTuple):
    """Result of a script."""

    status: int
    """Exit code, or the negative signal number."""
    output: str
    """stdout and stderr."""
    seconds: float


class Processes:
    """Runs scripts, one at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.stores.processes"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, code: str, *args: object) -> Result:
        """Run `code` with torch and the names of `lowtide.stores`. `args` are in `sys.argv`."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([textwrap.dedent(code), *map(str, args)]), file=self._server.stdin, flush=True)
        return Result(*json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        self._server.communicate()


def serve(timeout_seconds: float = 60.0) -> None:
    import torch

    import lowtide.stores

    torch.set_num_threads(1)
    for line in sys.stdin:
        code, *args = json.loads(line)
        with tempfile.TemporaryFile() as output:
            started = time.perf_counter()
            pid = os.fork()
            if pid == 0:
                run_script(code, args, output, {"torch": torch, **vars(lowtide.stores)})
            status = None
            while status is None:
                ended, raw = os.waitpid(pid, os.WNOHANG)
                if ended:
                    status = os.waitstatus_to_exitcode(raw)
                elif time.perf_counter() - started > timeout_seconds:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)
            output.seek(0)
            print(json.dumps([status, output.read().decode(), time.perf_counter() - started]), flush=True)


def run_script(code: str, args: list[str], output: IO[bytes], names: dict[str, object]) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.argv = ["script", *args]
    main = vars(sys.modules["__main__"])
    main.update(names, os=os, sys=sys)
    exec(code, main)  # in __main__: its globals live until shutdown
    sys.exit(0)


if __name__ == "__main__":
    serve()
