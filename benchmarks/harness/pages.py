"""The page of a run: a summary, tables and one plot for each model. Markdown; no torch."""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import median

from ..planners.tables import Row, budget_table
from .descriptions import describe
from .machine import machine_line
from .markdown import table
from .noise import ERRORS_BETWEEN_VARIANTS, FLOOR, MIN_ROUNDS, between_variants, spread
from .plots import frontier
from .records import ModelResult, Run
from .rows import read_rows
from .summary import summary
from .verdicts import (
    PLAN_FAMILIES,
    Verdict,
    at_equal_overhead,
    at_equal_peak,
    distance_to_bound,
    first_sentence,
    over_budget,
    peers,
    where_behind,
)

MIB = 2**20
WHY = Path(__file__).parents[1] / "why.md"
CONTROL = "plain-again"
OTHER_PAGES = {
    "scaling.md": "Cost against depth, batch and length; time of planning and recording",
    "overhead.md": "Cost of recording, per op",
    "schedules.md": "Schedules for chains compared with other packages",
    "../large/RESULTS.md": "The same comparison on seven models with steps of 1 to 3 s",
    "../held.md": "Budgets and predicted peaks on twelve architectures",
    "../smallest_budget.md": "The smallest budget of transformers, compared with a checkpoint on every block",
    "../scenarios.md": "Real training loops within a budget: several models, losses and backward passes",
    "../shapes.md": "Training with variable shapes",
    "../planners.md": "Greedy, knapsack and rotor compared with MILP on the same traces",
}
PLANNERS = "../planners.json"


def write_page(run: Run, page: Path, plots: Path, why: Path = WHY, plotted: Collection[str] = ()) -> None:
    """Write the page, and a plot of every model that is not in `plotted`."""
    page.parent.mkdir(parents=True, exist_ok=True)
    plots.mkdir(parents=True, exist_ok=True)
    links = {}
    for name, model in run.models.items():
        plot = plots / f"{name}.png"
        if name not in plotted:
            frontier(model, measurement_line(run), plot)
        links[name] = Path(os.path.relpath(plot, page.parent)).as_posix()
    others = {name: Path(os.path.relpath(plots / name, page.parent)).as_posix() for name in OTHER_PAGES
              if (plots / name).exists() and (plots / name).resolve() != page.resolve()}  # fmt: skip
    planners = plots / PLANNERS if run.settings.get("catalogue") == "standard" else None
    page.write_text(markdown(run, links, read_why(why), others, planners), encoding="utf-8")


def read_why(path: Path) -> dict[str, str]:
    """Return the hand-written reasons, by their headings `model/variant` (with * for any)."""
    if not path.exists():
        return {}
    parts = re.split(r"^## +(.+?) *$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {key: " ".join(text.split()) for key, text in zip(parts[1::2], parts[2::2], strict=True)}


def measurement_line(run: Run) -> str:
    """Return machine, versions, date and number of rounds in one line."""
    rounds = [len(one.cpu_s) for model in run.models.values() for name, one in model.measured().items()
              if name != "plain"]  # fmt: skip
    count = " to ".join(dict.fromkeys(str(edge(rounds)) for edge in (min, max))) if rounds else "no"
    return f"{machine_line(run.machine)}; {count} rounds"


def markdown(
    run: Run, links: dict[str, str], why: dict[str, str], others: dict[str, str], planners: Path | None
) -> str:
    """Return the whole page; `planners` is the file of `python -m benchmarks.planners`."""
    parts = [
        "# Benchmark results",
        "\n".join(f"- {line}" for line in summary(_measured(run))),
        f"Written by {_command(run)}; `python -m benchmarks report` writes it again from `results.json`.",
        "\n".join(f"- [{OTHER_PAGES[name]}]({link})" for name, link in others.items()),
        "## Distance to plain PyTorch and to the lower bound",
        "Overheads are shares of a plain step. The lower bound is the smallest overhead that the planner proves for "
        "any plan within the budget, from the op times of its profile. *planned@checkpoint*: the budget is the peak "
        "of `checkpoint`; *@half*: parameters, buffers and batch, and half of the rest of plain's peak; *@60*: 60 % of "
        "plain's peak; *@smallest*: the smallest budget with a plan. Differences are in percentage points (pp). "
        "A bound of 0.0 % below plain's peak means that planning proved no bound in its time. Measured distances "
        "contain the noise of the machine, so some are negative.",
        _plan_table(run),
        "## Distance to each peer at equal peak",
        "Each peer with the fastest of lowtide's plans whose measured peak is not above the peer's. Only measured "
        "plans count; values between them are not interpolated.",
        _equal_table(run, at_equal_peak),
        "## Peak at equal overhead",
        "Each peer with the smallest of lowtide's plans that was measured no slower.",
        _equal_table(run, at_equal_overhead),
        "## Where lowtide is behind",
        _behind(run, why),
        "## Budgets: predicted and measured",
        _budget_table(run),
        _resident(run),
        _planners(planners),
        "## How it was measured",
        f"{measurement_line(run)}. Load of the machine at the start: {run.machine['load']}. Settings of the "
        f"allocator: {_variables(run.machine['allocator'])}.",
        "All variants have the same model and batch. A round runs each variant once, each step between two plain "
        "steps. *Time* is processor time of all threads, divided by that of the two plain steps; the median over "
        "the rounds. *Min* divides the fastest step by the fastest of as many plain steps. *Peak* is the peak of live "
        "tensor bytes in a step, by the same meter for all. A comparison of two times is decided if they differ by "
        f"more than {ERRORS_BETWEEN_VARIANTS:g} standard errors and by more than {100 * FLOOR:g} %, in at least "
        f"{MIN_ROUNDS} rounds. Otherwise it is undecided.",
        _control(run),
        _failed_models(run),
        "## All variants",
    ]
    for name, model in run.models.items():
        parts += [f"### {model.title}", f"![{model.title}]({links[name]})", _plain_line(model), _variant_table(model)]
    parts += _set_up(run)
    return "\n\n".join(part for part in parts if part) + "\n"


def _control(run: Run) -> str:
    """Return ratios between plain steps and their spread, by both clocks."""
    models = {name: model for name, model in _measured(run).items() if CONTROL in model.measured()}
    if not models:
        return ""
    ratios = ", ".join(f"{name} × {model.ratio(CONTROL):.3f}" for name, model in models.items())
    both = []
    for clock in ("cpu_s", "wall_s"):
        spreads = [spread([math.log(ratio) for ratio in model.ratios(CONTROL, clock)]) for model in models.values()]
        both.append(f"{100 * median(spreads):.1f} %" if math.isfinite(median(spreads)) else "unknown")
    return (
        f"Plain steps measured as a variant of their own (`{CONTROL}`): {ratios}. The standard deviation between "
        f"rounds (median of the models) is {both[0]} in processor time and {both[1]} in wall-clock time."
    )


def _set_up(run: Run) -> list[str]:
    """Return the section with the set-up of each variant."""
    texts = describe(name for model in run.models.values() for name in model.variants)
    return ["## Set-up of each variant", "\n".join(f"- **{name}**: {text}" for name, text in texts.items())]


def _command(run: Run) -> str:
    if run.settings.get("catalogue") == "large":
        return "`python -m benchmarks run --large`"
    return "`python -m benchmarks run`, which is part of `make bench`"


def _variables(allocator: dict[str, str]) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in allocator.items()) or "none"


def _failed_models(run: Run) -> str:
    broken = [f"{name}: {model.plain.error}" for name, model in run.models.items() if not model.plain.measured]
    return "Not measured: " + "; ".join(broken) + "." if broken else ""


def _measured(run: Run) -> dict[str, ModelResult]:
    return {name: model for name, model in run.models.items() if model.plain.measured}


def _equal_table(run: Run, judge: Callable[[ModelResult, str], Verdict]) -> str:
    rows = []
    for name, model in _measured(run).items():
        for peer in peers(model):
            one = judge(model, peer)
            theirs = [_share(model, peer), _time(model, peer)]
            if one.ours is None or one.difference is None:
                rows.append([name, peer, *theirs, "none", "", "", "", one.outcome])
                continue
            more = f"{100 * (one.difference.ratio - 1):+.1f} %"
            rows.append(
                [name, peer, *theirs, one.ours, _share(model, one.ours), _time(model, one.ours), more, one.outcome]
            )
    header = (
        "model",
        "peer",
        "peer's peak",
        "peer's time",
        "lowtide's plan",
        "its peak",
        "its time",
        "lowtide over peer",
        "lowtide is",
    )
    return table(header, rows) if rows else "No peers in this run."


def _plan_table(run: Run) -> str:
    """Return a table of the plans: overhead over plain PyTorch, prediction and lower bound."""
    rows = []
    for name, model in _measured(run).items():
        for variant, one in model.variants.items():
            if one.family not in PLAN_FAMILIES:
                continue
            if not one.measured:
                rows.append([name, variant, "", "", "", "", "", first_sentence(one.error or "not timed")])
                continue
            distance = distance_to_bound(model, variant)
            overhead = between_variants(model, variant, "plain").ratio - 1
            planned = [model.planned_overhead(variant, key) for key in ("predicted", "bound")]
            cells = [_percent(share) for share in (overhead, *planned)]
            above = ["", ""] if distance is None else [_points(distance.predicted), _points(distance.measured)]
            rows.append([name, variant, _share(model, variant), *cells, *above])
    header = ("model", "plan", "peak, of plain's", "measured overhead", "predicted", "lower bound",
              "predicted above bound", "measured above bound")  # fmt: skip
    return table(header, rows) if rows else "No plans in this run."


def _behind(run: Run, why: dict[str, str]) -> str:
    lines = []
    for name, model in _measured(run).items():
        for one in where_behind(name, model):
            key = f"{one.model}/{one.variant}"
            reasons = [text for pattern, text in why.items() if fnmatch.fnmatchcase(key, pattern)]
            lines.append(
                f"- **{one.model} / {one.variant}**: {one.sentence}" + "".join(f" *Why: {r}*" for r in reasons)
            )
    listed = "\n".join(lines) or "Nowhere beyond the noise."
    return "\n\n".join([listed, *_undecided(run)])


def _undecided(run: Run) -> list[str]:
    """Return the number of undecided comparisons, and those in which lowtide has the larger median."""
    verdicts = [(name, at_equal_peak(model, peer)) for name, model in _measured(run).items() for peer in peers(model)]
    undecided = [(name, one) for name, one in verdicts if one.outcome == "undecided"]
    if not undecided:
        return []
    larger = [
        f"{name} / {one.peer} ({100 * (one.difference.ratio - 1):+.1f} %)"
        for name, one in undecided
        if one.difference is not None and one.difference.ratio > 1
    ]
    return [
        f"Of {len(verdicts)} comparisons at equal peak {len(undecided)} are undecided. In these lowtide has the larger "
        f"median: {', '.join(larger) or 'none'}."
    ]


def _budget_table(run: Run) -> str:
    rows = []
    for name, model in _measured(run).items():
        for variant, one in model.variants.items():
            if one.asked_bytes is None or one.error is not None:
                continue
            predicted = "" if one.predicted_bytes is None else _mib(one.predicted_bytes)
            own = "" if one.own_peak_bytes is None else _mib(one.own_peak_bytes)
            extra = _predicted_time(model, variant)
            within = "**no**" if over_budget(model, variant) else "yes"
            rows.append(
                [name, variant, _mib(one.asked_bytes), predicted, own, _mib(one.peak_bytes or 0), within, *extra]
            )
    header = ("model", "variant", "budget, MiB", "predicted", "measured by lowtide", "measured", "within",
              "time predicted", "lower bound", "time")  # fmt: skip
    return table(header, rows) if rows else "No budgets in this run."


def _predicted_time(model: ModelResult, variant: str) -> list[str]:
    """Return predicted time, lower bound and measured time, as multiples of a plain step."""
    planned = [model.planned_overhead(variant, key) for key in ("predicted", "bound")]
    measured = _time(model, variant) if model.variants[variant].measured else ""
    return [*("" if extra is None else f"× {1 + extra:.3f}" for extra in planned), measured]


def _resident(run: Run) -> str:
    allocator = run.settings.get("resident_allocator")
    if not allocator:
        return ""
    rows = [
        [name, variant, _mib(one.peak_bytes or 0), _mib(one.resident_step_bytes or 0), _mib(one.resident_bytes)]
        for name, model in _measured(run).items()
        for variant, one in model.variants.items()
        if one.resident_bytes is not None
    ]
    explanation = (
        f"Each variant runs in a new process with {_variables(allocator)}, so that freed memory returns to the system. "
        "The peak of live tensors includes parameters, buffers and batch; the rise in a step does not."
    )
    header = (
        "model",
        "variant",
        "peak of live tensors, MiB",
        "rise of resident memory in a step",
        "rise since before planning",
    )
    return "\n\n".join(["## Resident memory", explanation, table(header, rows)]) if rows else ""


def _planners(file: Path | None) -> str:
    """Return the section about planners, if they have been compared."""
    if file is None or not file.exists():
        return ""
    rows, _ = read_rows(file, Row)
    explanation = (
        f"Median predicted overheads on the traces of {len({row.model for row in rows})} models. A budget of 0 % is "
        "the smallest budget with a plan, 100 % is plain's peak. *MILP* is lowtide's integer programme, *solve* is the "
        "whole planner. If a planner finds no plan for some models, the number of its plans is in brackets."
    )
    return "\n\n".join(["## Greedy and knapsack beside MILP on the same traces", explanation, budget_table(rows)])


def _plain_line(model: ModelResult) -> str:
    if not model.plain.measured:
        return f"Plain fails: {model.plain.error}"
    return (
        f"Plain: {min(model.plain.cpu_s):.3f} s a step, peak {_mib(model.plain.peak_bytes or 0)} MiB, of which "
        f"{_mib(model.base_bytes)} are parameters, buffers and batch."
    )


def _variant_table(model: ModelResult) -> str:
    header = ["variant", "peak, MiB", "of plain's", "time", "min", "rounds", "loss and gradients", "buffers",
              "prepared in", "note"]  # fmt: skip
    rows = []
    for name, one in model.variants.items():
        if not one.measured or not model.plain.measured:
            rows.append([name, *[""] * (len(header) - 2), first_sentence(one.error or "not timed")])
            continue
        prepared = f"{one.preparation_s:.1f} s" if one.preparation_s and one.preparation_s > 0.05 else ""
        rows.append([
            name, _mib(one.peak_bytes or 0), _share(model, name), _time(model, name),
            f"× {model.ratio_of_minima(name):.3f}", str(len(one.cpu_s)), _equal(one.exact), _equal(one.buffers_equal),
            prepared, one.note,
        ])  # fmt: skip
    return table(header, rows)


def _equal(equal: bool | None) -> str:
    return {True: "equal", False: "**differ**", None: ""}[equal]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return f"{100 * share:+.1f} pp"


def _share(model: ModelResult, name: str) -> str:
    return f"{100 * model.peak_share(name):.1f} %"


def _time(model: ModelResult, name: str) -> str:
    return f"× {model.ratio(name):.3f}"
