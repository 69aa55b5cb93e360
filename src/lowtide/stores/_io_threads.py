"""A few threads that run jobs in the order given, and end when told to.

They are daemons that are told to stop before the interpreter goes, so a process neither hangs at its exit
nor dies in the middle of a write. `submit` and `stop` take no lock of Python's and may be called by the
garbage collector. A job should deal with its own errors; one that escapes is kept, never lost (`failure`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from .._errors import StoreError

Job = Callable[[], None]


class IoThreads:
    """Threads around one queue. They hold the queue, not this object."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=_run, args=(self._jobs, self._failures), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.stop()
            raise

    @property
    def failure(self) -> BaseException | None:
        """The first error that escaped from a job."""
        return self._failures[0] if self._failures else None

    def check(self) -> None:
        """Raise what has escaped from a job."""
        if self.failure is not None:
            raise StoreError(
                f"a background thread of the disk store failed: {self.failure!r}. Please report this"
            ) from self.failure

    def submit(self, job: Job) -> None:
        """Have `job` run after all that were submitted before have begun."""
        self._jobs.put(job)

    def has_current(self) -> bool:
        """Whether the caller is one of these threads."""
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """Have the threads end after the jobs already submitted."""
        for _ in self._threads:
            self._jobs.put(None)

    def join(self) -> None:
        """Wait until they have ended."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()


def _run(jobs: SimpleQueue[Job | None], failures: list[BaseException]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        try:
            job()
        except BaseException as error:
            failures.append(error.with_traceback(None))  # the frames would hold tensors
        del job  # it holds a value, and the next one may be long in coming
