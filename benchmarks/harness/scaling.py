"""Scaling: step time by depth, batch and length; planning time and the cost of recording by number of ops.

The model is a GPT-2; one of the three is varied at a time. Four variants run in each round: plain, a checkpoint on
every block, lowtide with `KeepAll` (the cost of recording), and lowtide's plan for 60 % of plain's peak.
"""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lowtide
from lowtide.fitting.plan import profile
from lowtide.planning import Problem, Simulator, solve
from lowtide.records import Trace

from . import machine
from .lowtide_variants import Rule
from .markdown import table
from .measurement import freeze_imports, measure_model
from .models import gpt2
from .plots import new_figure
from .steps import Bench, step
from .variants import named
from .verdicts import first_sentence

WIDTH, VOCAB_SIZE, SHARE = 64, 128, "60"  # narrow, so that activations are most of the peak
KEEP_ALL, PLANNED = "rule:keep all", f"planned@{SHARE}"
AXES: dict[str, list[tuple[int, int, int]]] = {
    # layers, batch, length
    "layers": [(layers, 4, 128) for layers in (6, 12, 24, 48, 96)],
    "batch": [(12, batch, 128) for batch in (2, 4, 8, 16, 32)],
    "length": [(12, 4, length) for length in (64, 128, 256, 512)],
}


@dataclass
class Point:
    """One size of the model."""

    axis: str
    layers: int
    batch: int
    length: int
    ops: int
    plain_s: float
    plain_peak_bytes: int
    ratios: dict[str, float]
    """Time by variant, divided by that of the plain steps around it; median of the rounds."""
    peak_shares: dict[str, float]
    profile_s: float
    """Time of the profiled step, without verification."""
    solve_s: float
    simulate_s: float
    """One run of the simulator."""
    record_us_an_op: float
    """Time of keep all above plain, per op."""
    record_bytes_an_op: float
    """Python memory of the records per op at the end of forward, if all values are to be recomputed."""
    trace_bytes: int
    """Size of the trace as JSON."""
    failures: dict[str, str]


def measure(quick: bool, rounds: int, out: Path, log: Callable[[str], None]) -> Path:
    """Measure all axes; write scaling.json, scaling.md and scaling.png after each point; return the page."""
    machine.use_one_thread()
    freeze_imports()
    out.mkdir(parents=True, exist_ok=True)
    setting = {**machine.describe(), "rounds": rounds}
    points: list[Point] = []
    for axis, sizes in AXES.items():
        for size in sizes[:2] if quick else sizes:
            log(f"{axis}: {size[0]} layers, batch {size[1]} × {size[2]}")
            points.append(_point(axis, size, rounds))
            _write(points, setting, out)
    return out / "scaling.md"


def _point(axis: str, size: tuple[int, int, int], rounds: int) -> Point:
    layers, batch, length = size
    bench = Bench("gpt2", gpt2(layers, WIDTH, batch, length, VOCAB_SIZE))
    variants = [named("plain"), named("checkpoint"), Rule(KEEP_ALL, lowtide.KeepAll), named(PLANNED)]
    model = measure_model(bench, variants, rounds, lambda line: None)
    bench.reset()
    started = time.perf_counter()
    trace = profile(bench.model, bench.batch)
    profiled = time.perf_counter()
    simulator = Simulator(Problem(trace))
    built = time.perf_counter()
    simulator.run([True] * len(trace.ops))
    simulated = time.perf_counter()
    solve_s, failure = _time_solve(trace, (model.plain.peak_bytes or 0) * int(SHARE) // 100 + bench.other_bytes)
    ops = len(trace.ops)
    measured = [name for name in model.measured() if name != "plain"]
    failures = {name: one.error for name, one in model.variants.items() if one.error is not None}
    over_plain_s = (model.ratio(KEEP_ALL) - 1) * min(model.plain.cpu_s)
    return Point(
        axis=axis,
        layers=layers,
        batch=batch,
        length=length,
        ops=ops,
        plain_s=min(model.plain.cpu_s),
        plain_peak_bytes=model.plain.peak_bytes or 0,
        ratios={name: model.ratio(name) for name in measured},
        peak_shares={name: model.peak_share(name) for name in measured},
        profile_s=profiled - started,
        solve_s=solve_s,
        simulate_s=simulated - built,
        record_us_an_op=1e6 * over_plain_s / ops,
        record_bytes_an_op=_record_bytes(bench) / ops,
        trace_bytes=len(trace.to_json()),
        failures=failures | failure,
    )


def _time_solve(trace: Trace, budget_bytes: int) -> tuple[float, dict[str, str]]:
    """Return the planning time for a budget, and the error if there is no plan."""
    started = time.perf_counter()
    try:
        solve(trace, budget_bytes)
    except lowtide.BudgetError as error:
        return time.perf_counter() - started, {"solve": str(error)}
    return time.perf_counter() - started, {}


def _record_bytes(bench: Bench) -> int:
    """Return the Python memory of the records of a forward pass, without that of plain autograd."""

    def python_bytes(forward: Callable[[], Any]) -> int:
        bench.reset()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        loss = forward()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del loss
        return after - before

    with Rule("rule:keep none", lowtide.KeepNone).applied(bench) as forward:
        step(forward)  # fills the caches about ops, which outlive a step
        bench.reset()
        return max(0, python_bytes(forward) - python_bytes(bench.loss))


def rewrite(out: Path) -> Path:
    """Write scaling.md and scaling.png again from scaling.json; return the page."""
    document = json.loads((out / "scaling.json").read_text(encoding="utf-8"))
    _write([Point(**point) for point in document["points"]], document["machine"], out)
    return out / "scaling.md"


def _write(points: list[Point], setting: dict[str, Any], out: Path) -> None:
    document = {"machine": setting, "points": [asdict(point) for point in points]}
    (out / "scaling.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / "scaling.md").write_text(markdown(points, setting), encoding="utf-8")
    draw(points, out / "scaling.png")


def markdown(points: list[Point], setting: dict[str, Any]) -> str:
    """Return the page."""
    parts = [
        "# Scaling",
        f"GPT-2, {WIDTH} wide. {machine.machine_line(setting)}; {setting['rounds']} rounds in turn, each step between "
        "two plain steps. Written by `python -m benchmarks scaling`, which is part of `make bench`.",
        "Times of variants are multiples of a plain step; peaks are shares of plain's. *Keep all* measures the cost of "
        "recording; *record* is the same per op, from the same times. *Records* is the Python memory of lowtide's "
        "records per op at the end of forward, if all values are to be recomputed. *Profile* is the time of the "
        "profiled step, *solve* that of planning, *trace* the size of the trace as JSON.",
        "![Scaling](scaling.png)",
    ]
    header = ("layers", "batch", "length", "ops", "plain, s", "checkpoint", "peak", "keep all", f"planned, {SHARE} %",
              "peak", "profile, s", "solve, s", "record, µs per op", "records, bytes per op", "trace, KiB")  # fmt: skip
    for axis in dict.fromkeys(point.axis for point in points):
        rows = [_row(point) for point in points if point.axis == axis]
        parts += [f"## {axis.capitalize()}", table(header, rows)]
        parts += [f"- {p.layers} layers, batch {p.batch} × {p.length}: {name} fails: {first_sentence(error)}"
                  for p in points if p.axis == axis for name, error in p.failures.items()]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _row(point: Point) -> list[str]:
    def ratio(name: str) -> list[str]:
        if name not in point.ratios:
            return ["fails", ""]
        return [f"× {point.ratios[name]:.3f}", f"{100 * point.peak_shares[name]:.0f} %"]

    return [
        *(str(n) for n in (point.layers, point.batch, point.length, point.ops)),
        f"{point.plain_s:.3f}", *ratio("checkpoint"), ratio(KEEP_ALL)[0], *ratio(PLANNED),
        f"{point.profile_s:.2f}", f"{point.solve_s:.2f}", f"{point.record_us_an_op:.1f}",
        f"{point.record_bytes_an_op:.0f}", f"{point.trace_bytes / 1024:.0f}",
    ]  # fmt: skip


def draw(points: list[Point], path: Path) -> None:
    """Plot the overheads along each axis, and profile and planning times by number of ops."""
    axes_measured = list(dict.fromkeys(point.axis for point in points))
    figure = new_figure(4.2 * (len(axes_measured) + 1), 3.8)
    panels = figure.subplots(1, len(axes_measured) + 1, squeeze=False)[0]
    lines = {"checkpoint": "#c0392b", KEEP_ALL: "#5dade2", PLANNED: "#0b6e99"}
    for panel, axis in zip(panels, axes_measured, strict=False):
        for name, colour in lines.items():
            measured = [p for p in points if p.axis == axis and name in p.ratios]
            xs = [getattr(p, axis) for p in measured]
            panel.plot(xs, [100 * (p.ratios[name] - 1) for p in measured], "o-", color=colour, ms=5, label=name)
        panel.set(xscale="log", xlabel=axis, ylabel="overhead, % of a plain step")
        panel.set_xticks(sorted({getattr(p, axis) for p in points if p.axis == axis}))
        panel.get_xaxis().set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.axhline(0, color="0.75", lw=1, zorder=0)
    panels[0].legend(frameon=False, fontsize=8)
    by_ops = sorted(points, key=lambda point: point.ops)
    for key, colour in (("profile_s", "#d9730d"), ("solve_s", "#8a4fbf"), ("simulate_s", "0.4")):
        label = key.removesuffix("_s")
        panels[-1].plot(
            [p.ops for p in by_ops], [getattr(p, key) for p in by_ops], "o", color=colour, ms=5, label=label
        )
    panels[-1].set(xscale="log", yscale="log", xlabel="ops in the step", ylabel="seconds")
    panels[-1].set_xticks(sorted({point.ops for point in points}))
    panels[-1].get_xaxis().set_major_formatter("{x:g}")
    panels[-1].tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    panels[-1].legend(frameon=False, fontsize=8)
    for panel in panels:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
