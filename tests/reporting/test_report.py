"""`Report`: its numbers, its terminal tables and its figure."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from lowtide._errors import ArgumentError, MissingPackageError
from lowtide.planning import solve
from lowtide.reporting.report import Report
from tests.planning.traces import gpt_trace, make_trace

from .reports import gpt_report, hostile_report


def printed(report, width=160):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(report)
    return console.file.getvalue()


def test_numbers_agree_with_the_plan():
    report = gpt_report()
    plan = report.plan
    assert report.predicted_peak_bytes == plan.predicted_peak_bytes
    assert report.predicted_step_s == plan.predicted_step_s
    by_name = {summary.name: summary for summary in plan.modules}
    assert len(report.modules) == len(by_name)
    for row in report.modules:
        summary = by_name[row.name]
        assert (row.ops, row.kept_bytes, row.recomputed_bytes) == (
            summary.ops,
            summary.kept_bytes,
            summary.recomputed_bytes,
        )
        assert row.recompute_s == pytest.approx(summary.recompute_s)
    assert sum(row.replays for row in report.modules) == plan.replayed_ops > 0


def test_values_are_counted_by_module():
    report = gpt_report()
    saved = set(report.trace.saved)
    recomputed = [v for j in report.plan.recomputed for v in report.trace.ops[j].outputs if v in saved]
    assert sum(row.values_recomputed for row in report.modules) == len(recomputed) > 0
    blocks = next(row for row in report.modules if row.name == "transformer.h.*.mlp.c_fc")
    assert blocks.modules == 3


def test_a_plan_for_another_trace_raises():
    with pytest.raises(ArgumentError, match="report on the trace that the plan was solved for"):
        Report.of(gpt_trace(2), gpt_report().plan)


def test_comparisons_of_predicted_and_measured_numbers():
    peak, step = gpt_report().comparisons
    assert (peak.name, step.name) == ("peak", "step time")
    assert peak.difference == pytest.approx(-4096 / gpt_report().predicted_peak_bytes)
    assert step.difference == pytest.approx(0.1)
    assert (peak.percent, step.percent) == ("+0.0 %", "+10.0 %")
    unmeasured = Report.of(gpt_report().trace, gpt_report().plan)
    assert unmeasured.comparisons == ()


def test_terminal_tables_are_complete():
    text = printed(gpt_report())
    for words in ("peak", "budget", "measured", "kept", "transformer.h.*.mlp.act", "keep matmuls and attention"):
        assert words in text
    assert "pinned" not in text.lower()
    text = printed(hostile_report())
    assert "Pinned ops" in text
    assert "document.title" in text  # names are not parsed as rich markup
    assert any(line.count("[bold]") == 3 for line in printed(hostile_report(), 300).split("\n"))  # op, module, reason


def test_a_long_list_of_modules_is_shortened_with_sums():
    from lowtide.reporting.terminal import shorten

    modules = gpt_report().modules
    short = shorten(modules, 3)
    assert len(short) == 3
    assert short[-1].name == f"{len(modules) - 2} other patterns"
    for field in ("ops", "kept_bytes", "values_recomputed", "replays"):
        assert sum(getattr(row, field) for row in short) == sum(getattr(row, field) for row in modules)


def test_a_report_of_a_step_without_ops():
    empty = make_trace()
    report = Report.of(empty, solve(empty, 1))
    assert "no ops" in printed(report)
    assert "no ops" in report.to_html()
    assert report.figure() is not None


@pytest.mark.parametrize("make", [gpt_report, hostile_report])
def test_the_figure_shows_the_budget_and_the_peak(make, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    report = make()
    figure = report.figure()
    assert len(figure.axes) == 3
    for axes in figure.axes[:2]:
        drawn = {line.get_label(): line for line in axes.get_lines()}
        assert drawn["budget"].get_ydata()[0] * 2**20 == report.plan.budget_bytes
        marks = [line.get_ydata()[0] for line in axes.get_lines() if line.get_marker() == "v"]
        assert marks == [report.predicted_peak_bytes / 2**20]
        top = max(area.get_paths()[0].vertices[:, 1].max() for area in axes.collections)
        assert top * 2**20 == pytest.approx(report.predicted_peak_bytes)
    report.save_png(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_frontier_there_are_two_panels():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    assert len(replace(gpt_report(), frontier=None).figure().axes) == 2


def test_the_error_without_matplotlib_names_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes the import fail as if not installed
    with pytest.raises(MissingPackageError, match=r'pip install "lowtide\[plots\]"'):
        gpt_report().figure()


def test_reports_do_not_import_torch(request):
    code = """
import sys
from tests.reporting.reports import gpt_report
report = gpt_report()
str(report), report.table(), report.to_html(), report._repr_html_(), report.to_chrome_trace()
print([name for name in ("torch", "jax", "matplotlib") if name in sys.modules])
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=request.config.rootpath
    )
    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stderr


def test_a_profiled_step():
    torch = pytest.importorskip("torch")
    from lowtide.fitting.plan import profile

    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.1)) for _ in range(6)]
    model = torch.nn.Sequential(*blocks)
    trace = profile(model, torch.randn(256, 64), loss=lambda out: out.square().mean())
    plan = solve(trace, int(0.9 * trace.peak_bytes), deadline_s=5)
    report = Report.of(trace, plan)
    assert plan.replayed_ops > 0
    assert report.timeline.live_bytes.max() == plan.predicted_peak_bytes
    assert report.timeline.duration_s == pytest.approx(plan.predicted_step_s)
    parameters = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert report.timeline.category_bytes[0, 0] >= parameters  # the batch counts too
