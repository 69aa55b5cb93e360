"""Run checks in forked processes, so that a crash of the interpreter is a failure of one check."""

from __future__ import annotations

import gc
import json
import os
import signal
import traceback
from collections.abc import Callable, Sequence

SECONDS_PER_ITEM = 120


def run_forked(items: Sequence[str], check: Callable[[str], dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the result of `check` for each item.

    The items run one after another in a forked process. If it crashes or hangs, the item has the result `{"": why}`,
    and the rest runs in another process.
    """
    results: dict[str, dict[str, str]] = {}
    while len(results) < len(items):
        left = [item for item in items if item not in results]
        status = _run_some(left, check, results)
        if status and len(results) < len(items):
            crashed = next(item for item in items if item not in results)
            results[crashed] = {"": f"the process ended with status {status}"}
    return results


def _run_some(items: Sequence[str], check: Callable[[str], dict[str, str]], results: dict[str, dict[str, str]]) -> int:
    gc.collect()
    gc.freeze()  # collections in the child would copy shared memory pages
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        try:
            with os.fdopen(writing, "w") as pipe:
                for item in items:
                    signal.alarm(SECONDS_PER_ITEM)
                    print(json.dumps([item, _checked(item, check)]), file=pipe, flush=True)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        for line in pipe:
            item, result = json.loads(line)
            results[item] = result
    gc.unfreeze()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _checked(item: str, check: Callable[[str], dict[str, str]]) -> dict[str, str]:
    try:
        return check(item)
    except BaseException:
        return {"": traceback.format_exc()}
