"""A script under `lowtide run` has the same names, arguments, exceptions, exit codes and signals as without.

The scripts do not import torch, so lowtide does not either.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from .processes import ENVIRONMENT, LOWTIDE, run, run_both


def write(directory: Path, code: str, name: str = "script.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(code))
    return path


ENVIRONMENT_SCRIPT = """
    from __future__ import annotations
    import inspect, os, pickle, sys
    print(__name__, __file__, __spec__ and __spec__.name, __package__, __doc__, sys.argv, sys.path[0])
    print(inspect.getsource(sys.modules["__main__"])[:20])
    print(sorted(k for k in globals() if k[:2] == "__" and k != "__annotations__"))
    class Thing: pass
    print(type(pickle.loads(pickle.dumps(Thing()))).__module__, sys.stdin.read())
    import neighbour
    print(neighbour.WORD, "torch" in sys.modules)
"""


def test_script_has_the_same_environment(tmp_path: Path) -> None:
    write(tmp_path, "WORD = 'found'", "neighbour.py")
    script = write(tmp_path, ENVIRONMENT_SCRIPT)
    plain, ours = run_both(script, "a", "--lr", "3", "--", "-m", "--budget", "--help", stdin="text on stdin")
    assert plain.status == 0
    assert "found False" in plain.out
    assert ours == plain._replace(resident_bytes=ours.resident_bytes)


EXITS = {
    "returns": "print('done')",
    "exit code": "import sys; sys.exit(7)",
    "exit with a message": "import sys; sys.exit('a message')",
    "exit without a code": "raise SystemExit",
    "exception": "def f():\n    raise ValueError('expected')\n\nf()",
    "exception with a cause": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('expected') from e",
    "end of input": "input()",
    "broken pipe": "raise BrokenPipeError(32, 'expected')",
    "syntax error": "def f(:\n",
    "own excepthook": "import sys; sys.excepthook = lambda *a: print(a[0].__name__); raise OSError",
    "exit functions": "import atexit; atexit.register(print, 'at exit'); raise OSError('expected')",
    "last_value at exit": "import atexit, sys; atexit.register(lambda: print(repr(sys.last_value))); raise OSError(1)",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)",
    "click.Abort": "import click; raise click.Abort",
}


@pytest.mark.parametrize("case", EXITS)
def test_script_exits_in_the_same_way(case: str, tmp_path: Path) -> None:
    plain, ours = run_both(write(tmp_path, EXITS[case]))
    assert (ours.status, ours.out) == (plain.status, plain.out)
    assert ours.err == plain.err


def test_traceback_of_a_recursion_error(tmp_path: Path) -> None:
    plain, ours = run_both(write(tmp_path, "def f(): f()\nf()"))
    assert ours.status == plain.status == 1
    assert plain.err.endswith("RecursionError: maximum recursion depth exceeded\n")
    assert [line for line in ours.err.splitlines() if "repeated" not in line] == [
        line for line in plain.err.splitlines() if "repeated" not in line
    ]


def test_module_has_the_same_environment(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    write(tmp_path / "package", "", "__init__.py")
    write(
        tmp_path / "package", textwrap.dedent(ENVIRONMENT_SCRIPT) + "from . import other; print(other.WORD)", "train.py"
    )
    write(tmp_path / "package", "WORD = 'inside'", "other.py")
    write(tmp_path, "WORD = 'found'", "neighbour.py")
    plain = run(sys.executable, "-m", "package.train", "-x", "1", cwd=tmp_path, stdin="text")
    ours = run(*LOWTIDE, "-q", "--budget", "1GiB", "-m", "package.train", "-x", "1", cwd=tmp_path, stdin="text")
    assert plain.status == 0
    assert (ours.status, ours.out) == (plain.status, plain.out)
    missing = run(*LOWTIDE, "--budget", "1GiB", "-m", "package.nonsense", cwd=tmp_path)
    assert missing.status == 1
    assert "No module named package.nonsense" in missing.err


def test_child_processes(tmp_path: Path) -> None:
    """Forked processes print no summary. Spawned processes can import the script."""
    script = write(
        tmp_path,
        """
        import multiprocessing, os, sys

        def square(x):
            return x * x

        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(square, [1, 2, 3]), flush=True)
            if os.fork() == 0:
                sys.exit(5)
            print(os.waitstatus_to_exitcode(os.wait()[1]))
        """,
    )
    plain = run(sys.executable, script)
    ours = run(*LOWTIDE, "--budget", "1GiB", script)
    assert (ours.status, ours.out) == (plain.status, plain.out)
    assert ours.err.count("lowtide run") == 1
    assert "did not import torch" in ours.err


def test_interrupt_from_another_process(tmp_path: Path) -> None:
    script = write(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(60)")
    command = [*LOWTIDE, "--budget", "1GiB", str(script)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # If the tests run in the background of a shell, child processes ignore SIGINT by default.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert "lowtide/" not in err.replace("lowtide run", "")
    assert "did not import torch" in err  # the summary is printed
