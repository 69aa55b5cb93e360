"""A report as a timeline in the Trace Event Format, for chrome://tracing and ui.perfetto.dev.

Tracks for forward, replays and backward, with live bytes as counters. Times are microseconds of the profile:
what was measured for each op, one after the other, not a second measurement.
"""

from __future__ import annotations

import json
from typing import Any

from .report import Report
from .timeline import BACKWARD, FORWARD, KINDS, REPLAY, UNPACKING

_PROCESS = 1
_TRACKS = {FORWARD: 1, REPLAY: 2, BACKWARD: 3, UNPACKING: 4}
_US = 1e6


def chrome_trace(report: Report) -> str:
    """The JSON text; events are in the order of time."""
    timeline, plan = report.timeline, report.plan
    events: list[dict[str, Any]] = [_named("process_name", 0, "lowtide")]
    events += [_named("thread_name", track, phase) for phase, track in _TRACKS.items()]
    for number, (moment, total) in enumerate(zip(timeline.moments, timeline.live_bytes.tolist(), strict=True)):
        start_us = _US * moment.start_s
        events.append(_counter("live bytes", start_us, {"all": total, "budget": plan.budget_bytes}))
        kinds = zip(KINDS, timeline.kind_bytes[number].tolist(), strict=True)
        events.append(_counter("live bytes by kind", start_us, dict(kinds)))
        op = report.trace.ops[moment.op] if moment.op is not None else None
        details: dict[str, Any] = {"what": timeline.describe(number), "live_bytes": total}
        if op is not None:
            details["module"] = op.module
        if moment.unpack is not None:
            details["unpack"] = moment.unpack
        events.append(
            {
                "ph": "X",
                "pid": _PROCESS,
                "tid": _TRACKS[moment.phase],
                "ts": start_us,
                "dur": _US * moment.duration_s,
                "name": op.name if op is not None else "from outside",
                "cat": moment.phase,
                "args": details,
            }
        )
    if timeline.moments:
        # Counters hold until the next event: say where the step ends.
        events.append(_counter("live bytes", _US * timeline.duration_s, {"all": 0, "budget": plan.budget_bytes}))
    about = {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": report.predicted_peak_bytes,
        "measured_peak_bytes": report.measured_peak_bytes,
        "device": report.trace.device,
    }
    return json.dumps({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}, allow_nan=False)


def _named(what: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": track, "name": what, "args": {"name": name}}


def _counter(name: str, at_us: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "pid": _PROCESS, "name": name, "ts": at_us, "args": values}
