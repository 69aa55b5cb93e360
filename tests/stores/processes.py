"""Scripts in processes of their own that need not import torch again: one process has, and forks for each.

Each script runs as a program does, to the very end of its interpreter. Run as a module, this is that process: it
takes one JSON line with the code and its arguments, and answers with one JSON line.
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


class Done(NamedTuple):
    """How a script ended."""

    status: int
    """The exit code, or minus the signal."""
    output: str
    """What it said on stdout and stderr."""
    seconds: float


class Processes:
    """Runs scripts, one at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.stores.processes"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, code: str, *args: object) -> Done:
        """Run `code`, with the stores and torch imported and `args` in `sys.argv`."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps([textwrap.dedent(code), *map(str, args)]), file=self._server.stdin, flush=True)
        return Done(*json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        self._server.communicate()


def serve(patience_seconds: float = 60.0) -> None:
    import torch

    import lowtide.stores

    torch.set_num_threads(1)
    for line in sys.stdin:
        code, *args = json.loads(line)
        with tempfile.TemporaryFile() as output:
            started = time.perf_counter()
            pid = os.fork()
            if pid == 0:
                play(code, args, output, {"torch": torch, **vars(lowtide.stores)})
            status = None
            while status is None:
                ended, raw = os.waitpid(pid, os.WNOHANG)
                if ended:
                    status = os.waitstatus_to_exitcode(raw)
                elif time.perf_counter() - started > patience_seconds:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)
            output.seek(0)
            print(json.dumps([status, output.read().decode(), time.perf_counter() - started]), flush=True)


def play(code: str, args: list[str], output: IO[bytes], names: dict[str, object]) -> NoReturn:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.argv = ["script", *args]
    main = vars(sys.modules["__main__"])
    main.update(names, os=os, sys=sys)
    exec(code, main)  # its globals live as long as a program's do
    sys.exit(0)


if __name__ == "__main__":
    serve()
