"""A program under `lowtide run` behaves as it does by itself: names, arguments, exceptions, exit codes, signals.

The scripts here import no torch, and neither does lowtide then.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from .processes import ENVIRONMENT, LOWTIDE, both, run


def written(directory: Path, code: str, name: str = "script.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(code))
    return path


SEES = """
    from __future__ import annotations
    import inspect, os, pickle, sys
    print(__name__, __file__, __spec__ and __spec__.name, __package__, __doc__, sys.argv, sys.path[0])
    print(inspect.getsource(sys.modules["__main__"])[:20])
    print(sorted(k for k in globals() if k[:2] == "__" and k != "__annotations__"))
    class Thing: pass
    print(type(pickle.loads(pickle.dumps(Thing()))).__module__, sys.stdin.read())
    import beside
    print(beside.WORD, "torch" in sys.modules)
"""


def test_it_sees_what_it_sees_by_itself(tmp_path: Path) -> None:
    written(tmp_path, "WORD = 'found'", "beside.py")
    script = written(tmp_path, SEES)
    plain, ours = both(script, "a", "--lr", "3", "--", "-m", "--budget", "--help", stdin="what it is fed")
    assert plain.status == 0
    assert "found False" in plain.out
    assert ours == plain._replace(resident_bytes=ours.resident_bytes)


ENDS = {
    "falls off its end": "print('done')",
    "exits": "import sys; sys.exit(7)",
    "exits with a sentence": "import sys; sys.exit('a sentence')",
    "exits with nothing": "raise SystemExit",
    "raises": "def f():\n    raise ValueError('as planned')\n\nf()",
    "raises from": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('as planned') from e",
    "ends of its input": "input()",
    "has a broken pipe": "raise BrokenPipeError(32, 'as planned')",
    "is no Python": "def f(:\n",
    "has its own hook": "import sys; sys.excepthook = lambda *a: print(a[0].__name__); raise OSError",
    "has exit functions": "import atexit; atexit.register(print, 'at exit'); raise OSError('as planned')",
    "looks back at exit": "import atexit, sys; atexit.register(lambda: print(repr(sys.last_value))); raise OSError(1)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(9)",
    "aborts a click command": "import click; raise click.Abort",
}


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_it_does_by_itself(how: str, tmp_path: Path) -> None:
    plain, ours = both(written(tmp_path, ENDS[how]))
    assert (ours.status, ours.out) == (plain.status, plain.out)
    assert ours.err == plain.err


def test_a_traceback_of_a_thousand_frames(tmp_path: Path) -> None:
    plain, ours = both(written(tmp_path, "def f(): f()\nf()"))
    assert ours.status == plain.status == 1
    assert plain.err.endswith("RecursionError: maximum recursion depth exceeded\n")
    assert [line for line in ours.err.splitlines() if "repeated" not in line] == [
        line for line in plain.err.splitlines() if "repeated" not in line
    ]


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    written(tmp_path / "package", "", "__init__.py")
    written(tmp_path / "package", textwrap.dedent(SEES) + "from . import other; print(other.WORD)", "train.py")
    written(tmp_path / "package", "WORD = 'inside'", "other.py")
    written(tmp_path, "WORD = 'found'", "beside.py")
    plain = run(sys.executable, "-m", "package.train", "-x", "1", cwd=tmp_path, stdin="fed")
    ours = run(*LOWTIDE, "-q", "--budget", "1GiB", "-m", "package.train", "-x", "1", cwd=tmp_path, stdin="fed")
    assert plain.status == 0
    assert (ours.status, ours.out) == (plain.status, plain.out)
    missing = run(*LOWTIDE, "--budget", "1GiB", "-m", "package.nonsense", cwd=tmp_path)
    assert missing.status == 1
    assert "No module named package.nonsense" in missing.err


def test_processes_that_it_starts(tmp_path: Path) -> None:
    """Forked ones say nothing of lowtide's; spawned ones find the script again."""
    script = written(
        tmp_path,
        """
        import multiprocessing, os, sys

        def square(x):
            return x * x

        if __name__ == "__main__":
            for way in ("fork", "spawn"):
                with multiprocessing.get_context(way).Pool(1) as pool:
                    print(way, pool.map(square, [1, 2, 3]), flush=True)
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


def test_an_interrupt_from_outside(tmp_path: Path) -> None:
    script = written(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(60)")
    command = [*LOWTIDE, "--budget", "1GiB", str(script)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # A shell that runs the tests in the background has its children ignore interrupts.
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
    assert "did not import torch" in err  # the summary is still written
