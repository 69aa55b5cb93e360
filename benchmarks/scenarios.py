"""Run real training loops within a budget: exact, peaks, planned steps, and time compared with a simple loop.

    python -m benchmarks.scenarios [--only NAME ...] [--share 0.6] [--rounds N] [--quick] [--out DIR] [--report]

The loops are the scenarios of `tests/scenarios` with larger batches. Four processes run each of them: the loop plain
and fitted, and a simple loop of the same model (one forward and one backward per step) plain and fitted. Budgets are
a share of the plain peak. Peaks are of torch's allocator, workspace of kernels included; a C++ compiler is needed.
Settled steps of the four processes alternate, and times are minima of processor time. Each process uses one thread.
Writes scenarios.json and scenarios.md.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.allocator import allocator_peak, live_bytes
from tests.scenarios.catalogue import ALL
from tests.scenarios.running import bits_of, process_bytes, results_of
from tests.scenarios.training import Fit, Scenario, Training
from torch import nn

import lowtide

from .harness import machine
from .harness.markdown import table
from .harness.processes import FailedLoopError, Process
from .harness.rows import rewrite_page, write_rows

MAX_COST = 1.15
"""Upper limit of the time of a scenario compared with a simple loop of the same model, each over plain."""
ROUNDS = 12
"""Timed steps of each process, at least. More if settled steps differ: three of each."""
_SIMPLE_STEPS = 7


@dataclass(frozen=True)
class Row:
    """One scenario. Bytes of other tensors in the process are subtracted."""

    scenario: str
    budget_bytes: int
    plain_peak_bytes: int
    error: str = ""
    """Why the fitted run stopped."""
    exact: bool | None = None
    """Whether all losses, and parameters, gradients and buffers after the last step, are bit-equal."""
    highest_bytes: int | None = None
    """Highest peak of all steps before the timed ones."""
    last_bytes: int | None = None
    """Peak of the last of them."""
    steps: int | None = None
    """Number of steps before the timed ones."""
    unplanned_calls: int | None = None
    """Steps without a plan, as the report of lowtide counts them."""
    planned: bool | None = None
    """Whether all reports show a plan and the last steps followed it."""
    warnings: tuple[str, ...] = ()
    """Warnings of lowtide."""
    plain_s: float | None = None
    fitted_s: float | None = None
    simple_plain_s: float | None = None
    simple_fitted_s: float | None = None
    simple_error: str = ""

    @property
    def held(self) -> bool:
        """Whether the peak of every step is within the budget."""
        return self.highest_bytes is not None and self.highest_bytes <= self.budget_bytes

    @property
    def ratio(self) -> float | None:
        """Time over plain."""
        return self.fitted_s / self.plain_s if self.fitted_s and self.plain_s else None

    @property
    def simple_ratio(self) -> float | None:
        """Time of the simple loop over plain."""
        return self.simple_fitted_s / self.simple_plain_s if self.simple_fitted_s and self.simple_plain_s else None

    @property
    def cost(self) -> float | None:
        """Time over plain, divided by that of the simple loop."""
        return self.ratio / self.simple_ratio if self.ratio and self.simple_ratio else None


@dataclass(frozen=True)
class Measured:
    """What a process found before the timed steps."""

    peaks: list[int]
    unplanned_calls: int
    planned: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What a process runs."""

    scenario: str
    simple: bool
    scale: int
    budget_bytes: int | None
    """None for a plain run."""
    steps: int
    """Steps before the timed ones."""
    period: int


def simple_loop(scenario: Scenario, fit: Fit, scale: int) -> Training:
    """Return a loop with one forward and one backward per step."""
    model, inputs = scenario.simple(scale)
    fit(model)

    def step(_: int) -> Sequence[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        loss = model(*inputs).square().mean()
        loss.backward()
        return (loss.detach(),)

    return Training(step, [model])


class Loop:
    """A loop in its own process: measures its first steps, then times one step per command."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.fitted: list[nn.Module] = []
        scenario = ALL[request.scenario]
        other_bytes = process_bytes()
        self.start_bytes = live_bytes()

        def fit(model: nn.Module, **options: Any) -> nn.Module:
            if request.budget_bytes is not None:
                self.fitted.append(lowtide.fit(model, budget=request.budget_bytes + other_bytes, **options))
            return model

        self.training = (
            simple_loop(scenario, fit, request.scale) if request.simple else scenario.build(fit, request.scale)
        )
        if self.fitted and self.training.reported is not None:
            self.fitted = list(self.training.reported)
        self.digest = hashlib.blake2b()
        self.steps = 0

    def step(self) -> float:
        """Run a step and return its processor time."""
        start = time.process_time()
        losses = self.training.step(self.steps)
        seconds = time.process_time() - start
        self.steps += 1
        for loss in losses:
            self.digest.update(bits_of(loss).tobytes())
        return seconds

    def measure(self) -> Measured:
        """Run the steps before the timed ones."""
        peaks, counts = [], []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(self.request.steps):
                with allocator_peak() as peak:
                    self.step()
                peaks.append(peak.peak_bytes - self.start_bytes)
                counts.append([lowtide.report(model).online_steps for model in self.fitted])
        has_plans = all(lowtide.report(model).plan is not None for model in self.fitted)
        last = counts[-1 - max(2, self.request.period) :]
        return Measured(
            peaks,
            sum(counts[-1]),
            has_plans and all(count == last[0] for count in last),
            tuple(str(w.message) for w in caught if issubclass(w.category, lowtide.LowtideWarning)),
        )

    def result(self) -> str:
        """Return a digest of all losses, and of parameters, gradients and buffers."""
        for name, bits in sorted(results_of(self.training).items()):
            self.digest.update(name.encode() + (b"" if bits is None else bits.tobytes()))
        return self.digest.hexdigest()


class TimedProcess(Process):
    """A loop in another process, and the times of its steps."""

    def __init__(self, request: Request) -> None:
        super().__init__(Loop, request)
        self.seconds: list[float] = []

    def step(self) -> None:
        """Time a step."""
        self.seconds.append(self.ask("step"))

    def fastest(self, period: int) -> float:
        """Return the mean of the fastest steps at each position of the period."""
        return sum(min(self.seconds[i::period]) for i in range(period)) / period


class Pair:
    """A loop plain and fitted, in two processes."""

    def __init__(self, scenario: Scenario, scale: int, share: float, *, simple: bool) -> None:
        self.period = 1 if simple else scenario.period
        steps = _SIMPLE_STEPS if simple else scenario.steps + (self.period if self.period > 1 else 0)
        self.fitted: TimedProcess | None = None
        self.found: Measured | None = None
        self.error = ""
        self.plain = TimedProcess(Request(scenario.name, simple, scale, None, steps, self.period))
        self.plain_peak_bytes = max(self.plain.ask("measure").peaks)
        self.budget_bytes = int(share * self.plain_peak_bytes)
        fitted = TimedProcess(Request(scenario.name, simple, scale, self.budget_bytes, steps, self.period))
        try:
            self.found, self.fitted = fitted.ask("measure"), fitted
        except FailedLoopError as error:
            self.error = str(error)
            fitted.close()

    def step(self) -> None:
        """Time a step of both."""
        if self.fitted is None:
            return
        self.plain.step()
        try:
            self.fitted.step()
        except FailedLoopError as error:
            self.error = str(error)
            self.fitted.close()
            self.fitted = None

    def times(self) -> tuple[float, float] | tuple[None, None]:
        if self.fitted is None:
            return None, None
        return self.plain.fastest(self.period), self.fitted.fastest(self.period)

    def is_exact(self) -> bool | None:
        return None if self.fitted is None else self.plain.ask("result") == self.fitted.ask("result")

    def close(self) -> None:
        for process in (self.plain, self.fitted):
            if process is not None:
                process.close()


def measure(scenario: Scenario, share: float, rounds: int, quick: bool) -> Row:
    """Return the results of one scenario."""
    scale = 1 if quick else scenario.bench_scale
    loop = Pair(scenario, scale, share, simple=False)
    simple = Pair(scenario, scale, share, simple=True)
    try:
        for _ in range(rounds if quick else max(rounds, 3 * scenario.period)):
            loop.step()
            simple.step()
        plain_s, fitted_s = loop.times()
        simple_plain_s, simple_fitted_s = simple.times()
        found = loop.found
        return Row(
            scenario.name,
            loop.budget_bytes,
            loop.plain_peak_bytes,
            error=loop.error,
            exact=loop.is_exact(),
            highest_bytes=max(found.peaks) if found else None,
            last_bytes=found.peaks[-1] if found else None,
            steps=len(found.peaks) if found else None,
            unplanned_calls=found.unplanned_calls if found else None,
            planned=found.planned if found else None,
            warnings=found.warnings if found else (),
            plain_s=plain_s,
            fitted_s=fitted_s,
            simple_plain_s=simple_plain_s,
            simple_fitted_s=simple_fitted_s,
            simple_error=simple.error,
        )
    finally:
        loop.close()
        simple.close()


def page(rows: list[Row], where: dict[str, Any]) -> str:
    """Return the page."""
    faults = [fault for row in rows for fault in _faults(row)]
    header = (
        "scenario", "bit-equal", "plain peak", "budget", "highest peak, of the budget", "last peak, of the budget",
        "planned", "plain step", "time over plain", "simple loop over plain", "scenario over simple loop",
    )  # fmt: skip
    parts = [
        "# Real training loops within a budget",
        f"Written by `python -m benchmarks.scenarios` on {where.get('processor')}, {where.get('date')}.",
        "Peaks are of torch's allocator, in every step from the first one on. *Planned* means that the last steps "
        "before the timed ones followed a plan. Times are minima of processor time of settled steps. The simple loop "
        "trains the same model with one forward and one backward per step, at the same share of its own plain peak.",
        f"Limits: every peak within the budget, and at most {MAX_COST:g} × the simple loop.",
        f"{len(rows) - len({fault.split(':')[0] for fault in faults})} of {len(rows)} scenarios have no fault."
        + ("" if faults else " All are bit-equal, within the budget, planned and within the limit of time."),
        "\n".join(f"- {fault}" for fault in faults),
        table(header, map(_cells, rows)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _faults(row: Row) -> list[str]:
    if row.error:
        return [f"{row.scenario}: {row.error.splitlines()[0]}"]
    faults = []
    if not row.exact:
        faults.append(f"{row.scenario}: not bit-equal")
    if not row.held:
        faults.append(f"{row.scenario}: {100 * (row.highest_bytes or 0) / row.budget_bytes:.0f} % of the budget")
    if not row.planned:
        faults.append(f"{row.scenario}: not planned")
    faults += [f"{row.scenario}: warning: {text.splitlines()[0]}" for text in row.warnings]
    if row.simple_error:
        faults.append(f"{row.scenario}: the simple loop stopped: {row.simple_error.splitlines()[0]}")
    elif row.cost is None or row.cost > MAX_COST:
        faults.append(f"{row.scenario}: {_times(row.cost)} the time of the simple loop")
    return faults


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f} ×"


def _cells(row: Row) -> list[str]:
    def of_budget(nbytes: int | None) -> str:
        return "–" if nbytes is None else f"{100 * nbytes / row.budget_bytes:.1f} %"

    mib = 2**20
    return [
        row.scenario,
        "–" if row.exact is None else "yes" if row.exact else "**no**",
        f"{row.plain_peak_bytes / mib:.1f} MiB", f"{row.budget_bytes / mib:.1f} MiB",
        of_budget(row.highest_bytes), of_budget(row.last_bytes),
        "–" if row.planned is None else "yes" if row.planned else "**no**",
        "–" if row.plain_s is None else f"{1000 * row.plain_s:.0f} ms",
        _times(row.ratio), _times(row.simple_ratio), _times(row.cost),
    ]  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scenarios", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(ALL)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, default=names, help=", ".join(names))
    parser.add_argument("--share", type=float, default=0.6, help="budget, as a share of the plain peak")
    parser.add_argument("--rounds", type=int, default=None, help=f"timed steps, at least (default {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="the sizes of the tests and three timed steps")
    parser.add_argument("--out", type=Path, default=machine.RESULTS, help="directory of the results")
    parser.add_argument("--report", action="store_true", help="write scenarios.md again from scenarios.json")
    options = parser.parse_args()
    file = options.out / "scenarios.json"
    if options.report:
        rewrite_page(file, Row, page)
        return
    live_bytes()  # builds the counting allocator before processes need it
    description = machine.describe()
    rounds = options.rounds or (3 if options.quick else ROUNDS)
    rows: list[Row] = []
    for name in options.only:
        row = measure(ALL[name], options.share, rounds, options.quick)
        rows.append(row)
        print(f"{name:26} {'; '.join(_faults(row)) or f'{_times(row.cost)} the simple loop'}", file=sys.stderr)
        write_rows(file, rows, description, page)
    print(file.with_suffix(".md"))


if __name__ == "__main__":
    main()
