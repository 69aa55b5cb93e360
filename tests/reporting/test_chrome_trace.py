"""Reports in the Trace Event Format of Chrome and Perfetto."""

import json
from itertools import pairwise

import pytest

from lowtide.reporting.timeline import BACKWARD, FORWARD, REPLAY

from .reports import gpt_report, hostile_report


def events_of(report):
    return json.loads(report.to_chrome_trace())["traceEvents"]


@pytest.mark.parametrize("make", [gpt_report, hostile_report])
def test_events_are_consecutive(make):
    timed = [event for event in events_of(make()) if event["ph"] != "M"]
    assert all(earlier["ts"] <= later["ts"] for earlier, later in pairwise(timed))
    slices = [event for event in timed if event["ph"] == "X"]
    for earlier, later in pairwise(slices):
        assert earlier["ts"] + earlier["dur"] == pytest.approx(later["ts"])
    assert slices[-1]["ts"] + slices[-1]["dur"] == pytest.approx(1e6 * make().predicted_step_s)


def test_each_phase_has_its_own_track():
    report = gpt_report()
    slices = [event for event in events_of(report) if event["ph"] == "X"]
    names = {e["tid"]: e["args"]["name"] for e in events_of(report) if e["name"] == "thread_name"}
    by_track = {track: [e for e in slices if names[e["tid"]] == track] for track in (FORWARD, REPLAY, BACKWARD)}
    assert [e["name"] for e in by_track[FORWARD]] == [op.name for op in report.trace.ops]
    assert [e["dur"] for e in by_track[FORWARD]] == pytest.approx([1e6 * op.time_s for op in report.trace.ops])
    assert len(by_track[REPLAY]) == report.plan.replayed_ops
    extra_s = report.plan.predicted_step_s - report.plan.plain_step_s
    assert sum(e["dur"] for e in by_track[REPLAY]) == pytest.approx(1e6 * extra_s)
    assert [e["args"]["unpack"] for e in by_track[BACKWARD]] == list(range(len(report.trace.unpacks)))


def test_counters_show_live_bytes():
    report = gpt_report()
    counters = [event for event in events_of(report) if event["ph"] == "C"]
    totals = [e["args"]["all"] for e in counters if e["name"] == "live bytes"]
    by_category = [sum(e["args"].values()) for e in counters if e["name"] == "live bytes by category"]
    assert max(totals) == report.predicted_peak_bytes
    assert totals[:-1] == by_category  # the last counter event marks the end of the step


def test_save_chrome_trace(tmp_path):
    gpt_report().save_chrome_trace(tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))["otherData"]["device"] == "cpu"
