"""A report in the Trace Event Format, for chrome://tracing and ui.perfetto.dev.

There is one track for each phase, and counters of live bytes. Times are the profiled times of single ops,
one after the other, in microseconds; they are not a measurement of the planned step.
"""

from __future__ import annotations

import json
from typing import Any

from .report import Report
from .timeline import BACKWARD, CATEGORIES, DECOMPRESS, FORWARD, REPLAY

_PROCESS = 1
_TRACKS = {FORWARD: 1, REPLAY: 2, BACKWARD: 3, DECOMPRESS: 4}
_US = 1e6


def chrome_trace(report: Report) -> str:
    """Return the JSON text, with events in order of time."""
    timeline, plan = report.timeline, report.plan
    events: list[dict[str, Any]] = [_metadata("process_name", 0, "lowtide")]
    events += [_metadata("thread_name", track, phase) for phase, track in _TRACKS.items()]
    for number, (interval, total) in enumerate(zip(timeline.intervals, timeline.live_bytes.tolist(), strict=True)):
        start_us = _US * interval.start_s
        events.append(_counter("live bytes", start_us, {"all": total, "budget": plan.budget_bytes}))
        categories = zip(CATEGORIES, timeline.category_bytes[number].tolist(), strict=True)
        events.append(_counter("live bytes by category", start_us, dict(categories)))
        op = report.trace.ops[interval.op] if interval.op is not None else None
        details: dict[str, Any] = {"description": timeline.describe(number), "live_bytes": total}
        if op is not None:
            details["module"] = op.module
        if interval.unpack is not None:
            details["unpack"] = interval.unpack
        events.append(
            {
                "ph": "X",
                "pid": _PROCESS,
                "tid": _TRACKS[interval.phase],
                "ts": start_us,
                "dur": _US * interval.duration_s,
                "name": op.name if op is not None else "source",
                "cat": interval.phase,
                "args": details,
            }
        )
    if timeline.intervals:
        # A counter keeps its value until the next event, so the end of the step needs one.
        events.append(_counter("live bytes", _US * timeline.duration_s, {"all": 0, "budget": plan.budget_bytes}))
    metadata = {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "device": report.trace.device,
    }
    return json.dumps({"displayTimeUnit": "ms", "otherData": metadata, "traceEvents": events}, allow_nan=False)


def _metadata(field: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": track, "name": field, "args": {"name": name}}


def _counter(name: str, at_us: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": _PROCESS, "name": name, "ts": at_us, "args": values}
