"""Background threads that run jobs in order.

The threads are daemons that are stopped before the interpreter shuts down, so a process neither hangs on exit
nor ends in the middle of a write. `submit` and `stop` take no Python lock, so the garbage collector may call
them. Jobs should handle their own errors; an error that escapes from a job is kept in `failure`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from .._errors import StoreError

Job = Callable[[], None]


class IoThreads:
    """Threads that share one job queue. They reference the queue, not this object."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.failures: list[BaseException] = []  # errors that escaped from jobs
        self._threads = [
            threading.Thread(target=_run, args=(self._jobs, self.failures), name=f"{name}-{i}", daemon=True)
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
        """First error that escaped from a job."""
        return self.failures[0] if self.failures else None

    def check(self) -> None:
        """Raise `StoreError` if an error escaped from a job."""
        if self.failure is not None:
            raise StoreError(
                f"a background thread of the disk store failed: {self.failure!r}. Please report this"
            ) from self.failure

    def submit(self, job: Job) -> None:
        """Queue `job`. Jobs start in the order of submission."""
        self._jobs.put(job)

    def is_idle(self) -> bool:
        """Return whether no job is queued. A job may still run."""
        return self._jobs.empty()

    def has_current(self) -> bool:
        """Return whether the calling thread is one of these threads."""
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """Tell the threads to end after the submitted jobs."""
        for _ in self._threads:
            self._jobs.put(None)

    def join(self) -> None:
        """Wait until the threads have ended."""
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
            failures.append(error.with_traceback(None))  # the frames would keep tensors alive
        del job  # references a value, and the next job may come late
