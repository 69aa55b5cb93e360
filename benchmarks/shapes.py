"""Train with batches of variable shapes: time compared with plain PyTorch, peaks, exactness, profiles and plans.

    python -m benchmarks.shapes [--only NAME ...] [--steps N] [--quick] [--out DIR] [--report]

Almost every step has other sizes. All variants run the same sequence of batches with AdamW, each in its own process
with one thread, and their steps alternate. Budgets are shares of the plain peak of the largest steps. Peaks are of
torch's allocator, workspace of kernels included; a C++ compiler is needed. Times are processor times, and include
profiled steps and planning. Writes shapes.json, shapes.md and shapes.png.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import sys
import time
import warnings
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tests.allocator import allocator_peak, live_bytes
from tests.scenarios.running import bits_of, process_bytes, results_of
from tests.scenarios.training import Training

import lowtide
from lowtide.fitting import registry

from .harness import machine, plots
from .harness.blocks import each_block_checkpointed
from .harness.markdown import table
from .harness.processes import FailedLoopError, Process
from .harness.rows import read_rows, write_rows
from .harness.workloads import STANDARD, TINY, Workload

STEPS, QUICK_STEPS = 200, 16
SHARES = (0.6, 0.35)
"""Budgets, as shares of the plain peak."""
_LARGEST = 4
"""Number of largest batches of which the plain peak is measured."""
PLAIN, CHECKPOINT, FIT, BUDGET = "plain", "checkpoint", "lowtide.fit", "lowtide.budget"
STYLES = {
    CHECKPOINT: plots.STYLES["torch checkpoint"],
    FIT: plots.STYLES["lowtide planned"],
    BUDGET: plots.STYLES["lowtide online"],
}


@dataclass(frozen=True)
class Row:
    """One variant of one workload. Bytes of other tensors in the process are subtracted."""

    workload: str
    title: str
    variant: str
    share: float | None
    """Budget, as a share of the plain peak; None without a budget."""
    budget_bytes: int | None
    plain_peak_bytes: int
    """The highest plain peak of the largest batches."""
    sizes: int
    """Number of different sizes of the batches."""
    steps: int
    error: str = ""
    """Why the run stopped."""
    equal_losses: bool | None = None
    """Whether all losses are bit-equal to the plain ones."""
    equal_results: bool | None = None
    """Whether parameters, gradients and buffers after the last step are."""
    highest_bytes: int | None = None
    """Highest peak of all steps."""
    steps_over: int | None = None
    """Number of steps with a peak above the budget."""
    plain_s: float | None = None
    """Time of all plain steps."""
    total_s: float | None = None
    """Time of all steps and of `lowtide.fit` itself."""
    settled: float | None = None
    """Median time over plain of the steps in the second half."""
    profiled_steps: int | None = None
    unplanned_steps: int | None = None
    """Steps without a plan, profiled ones included."""
    plans: int | None = None
    """Number of plans that were made."""
    planning_s: float | None = None
    """Wall-clock time of planning."""
    warnings: tuple[str, ...] = ()
    """Warnings of lowtide."""

    @property
    def name(self) -> str:
        return self.variant if self.share is None else f"{self.variant}, {100 * self.share:g} %"

    @property
    def ratio(self) -> float | None:
        """Time over plain."""
        return self.total_s / self.plain_s if self.total_s and self.plain_s else None

    @property
    def held(self) -> bool | None:
        """Whether all peaks are within the budget."""
        return None if self.highest_bytes is None or self.share is None else not self.steps_over


@dataclass(frozen=True)
class Step:
    """Time and peak of a step."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Result:
    """What a process has found at the end."""

    losses: str
    """Digest of all losses."""
    tensors: str
    """Digest of parameters, gradients and buffers."""
    start_s: float
    """Time of `lowtide.fit` itself."""
    profiled_steps: int
    unplanned_steps: int
    plans: int
    planning_s: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What a process runs."""

    workload: str
    quick: bool
    steps: int
    variant: str
    budget_bytes: int | None = None


@dataclass(frozen=True)
class Probed:
    """What is known of a workload before the run."""

    peak_bytes: int
    sizes: int


class MadeObjects:
    """Count objects that are seen, each once."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Any]] = []

    @property
    def count(self) -> int:
        return len(self._seen)

    def see(self, item: Any) -> None:
        if not any(seen() is item for seen in self._seen):
            self._seen.append(weakref.ref(item))


class Loop:
    """A training loop that runs one step per command."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.workload = workloads(request.quick)[request.workload]
        other_bytes = process_bytes()
        self.start_bytes = live_bytes()
        self.budget = None if request.budget_bytes is None else f"{request.budget_bytes + other_bytes} B"
        self.applied = contextlib.ExitStack()
        self.warnings: list[str] = []
        self.profiles, self.plans = MadeObjects(), MadeObjects()
        self._begin()

    def _begin(self) -> None:
        """Make the model and the optimizer."""
        self.model, _ = self.workload.case.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        start = time.process_time()
        if self.request.variant == CHECKPOINT:
            self.applied.enter_context(each_block_checkpointed(self.model, {"use_reentrant": False}))
        elif self.request.variant == FIT:
            lowtide.fit(self.model, budget=self.budget, optimizer=self.optimizer)
        self.start_s = time.process_time() - start
        self.digest = hashlib.blake2b()
        self.steps = 0
        gc.collect()  # imports leave so many objects that a later collection takes as long as some steps

    def probe(self) -> Probed:
        """Return the highest peak of the largest batches, and the number of different sizes. Then begin again."""
        shapes = [shapes_of(self.workload.batch(i)) for i in range(self.request.steps)]
        elements = [sum(torch.Size(shape).numel() for shape in batch) for batch in shapes]
        largest = sorted(range(len(shapes)), key=lambda i: elements[i])[-_LARGEST:]
        self._train(largest[0])  # afterwards the optimizer has its state
        probed = Probed(max(self._train(i).peak_bytes for i in largest), len(set(shapes)))
        self._begin()
        return probed

    def step(self) -> Step:
        """Run the next step."""
        step = self._train(self.steps)
        self.steps += 1
        if self.request.variant == FIT:
            for family in registry.state_of(self.model).families.values():
                for sized in family.plans:
                    self.plans.see(sized)
                if family.new_profile is not None:
                    self.profiles.see(family.new_profile)
        return step

    def _train(self, index: int) -> Step:
        with warnings.catch_warnings(record=True) as caught, allocator_peak() as peak:
            warnings.simplefilter("always")
            batch = self.workload.batch(index)
            start = time.process_time()
            self.optimizer.zero_grad(set_to_none=True)
            with self._scope():
                output = self.model(**batch)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
            self.optimizer.step()
            seconds = time.process_time() - start
            self.digest.update(bits_of(loss).tobytes())
            del output, loss, batch
        self.warnings += [str(w.message) for w in caught if issubclass(w.category, lowtide.LowtideWarning)]
        return Step(seconds, peak.peak_bytes - self.start_bytes)

    def _scope(self) -> AbstractContextManager[Any]:
        if self.request.variant == BUDGET:
            return lowtide.budget(self.budget)
        return contextlib.nullcontext()

    def result(self) -> Result:
        """Return digests and counts."""
        digest = hashlib.blake2b()
        for name, bits in sorted(results_of(Training(lambda _: (), [self.model])).items()):
            digest.update(name.encode() + (b"" if bits is None else bits.tobytes()))
        report = lowtide.report(self.model) if self.request.variant == FIT else None
        return Result(
            self.digest.hexdigest(),
            digest.hexdigest(),
            self.start_s,
            self.profiles.count,
            report.online_steps if report is not None else 0,
            self.plans.count,
            report.planning_s if report is not None else 0.0,
            tuple(self.warnings),
        )


def workloads(quick: bool) -> dict[str, Workload]:
    """Return the workloads by name."""
    return TINY if quick else STANDARD


def shapes_of(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of all tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return (tuple(batch.shape),)
    parts = batch.values() if isinstance(batch, dict) else batch
    return tuple(shape for part in parts for shape in shapes_of(part))


class Run:
    """One variant in another process."""

    def __init__(self, process: Process, row: Row) -> None:
        self.process = process
        self.row = row
        self.steps: list[Step] = []
        self.result: Result | None = None

    def step(self) -> None:
        """Run a step, unless the run has stopped."""
        if self.row.error:
            return
        try:
            self.steps.append(self.process.ask("step"))
        except FailedLoopError as error:
            self.row = replace(self.row, error=f"step {len(self.steps)}: {error}")

    def compare(self, plain: Run) -> Row:
        """Return the results, compared with those of the plain run."""
        if self.row.error:
            return self.row
        result, expected = self.process.ask("result"), plain.process.ask("result")
        ratios = [own.seconds / other.seconds for own, other in zip(self.steps, plain.steps, strict=True)]
        is_fit = self.row.variant == FIT
        return replace(
            self.row,
            equal_losses=result.losses == expected.losses,
            equal_results=result.tensors == expected.tensors,
            highest_bytes=max(step.peak_bytes for step in self.steps),
            steps_over=sum(step.peak_bytes > self.row.budget_bytes for step in self.steps)
            if self.row.budget_bytes is not None
            else None,
            plain_s=sum(step.seconds for step in plain.steps),
            total_s=result.start_s + sum(step.seconds for step in self.steps),
            settled=median(ratios[len(ratios) // 2 :]),
            profiled_steps=result.profiled_steps if is_fit else None,
            unplanned_steps=result.unplanned_steps if is_fit else None,
            plans=result.plans if is_fit else None,
            planning_s=result.planning_s if is_fit else None,
            warnings=result.warnings,
        )


def measure(name: str, quick: bool, steps: int, shares: Sequence[float]) -> list[Row]:
    """Return the results of all variants of one workload."""
    title = workloads(quick)[name].title
    request = Request(name, quick, steps, PLAIN)
    plain = Process(Loop, request)
    runs: list[Run] = []
    try:
        probed = plain.ask("probe")
        row = Row(name, title, PLAIN, None, None, probed.peak_bytes, probed.sizes, steps)
        runs.append(Run(plain, row))
        for variant, share in [(CHECKPOINT, None), *itertools.product((FIT, BUDGET), shares)]:
            budget_bytes = None if share is None else int(share * probed.peak_bytes)
            process = Process(Loop, replace(request, variant=variant, budget_bytes=budget_bytes))
            runs.append(Run(process, replace(row, variant=variant, share=share, budget_bytes=budget_bytes)))
        for i in range(steps):
            for run in runs[:: 1 if i % 2 else -1]:
                run.step()
        return [run.compare(runs[0]) for run in runs]
    finally:
        plain.close()
        for run in runs[1:]:
            run.process.close()


def page(rows: list[Row], where: dict[str, Any]) -> str:
    """Return the page."""
    faults = [fault for row in rows for fault in _faults(row)]
    parts = [
        "# Training with variable shapes",
        f"Written by `python -m benchmarks.shapes` on {where.get('processor')}, {where.get('date')}.",
        "Almost every step has other sizes, and every fortieth batch is smaller. *Time over plain* is the processor "
        "time of all steps divided by that of all plain steps, with profiled steps, planning and `fit` itself. "
        "*Settled* is the median of the steps in the second half. Peaks are of torch's allocator, the highest of all "
        "steps from the first one on. The peak of a checkpoint on every block is compared with the plain peak, because "
        "it has no budget; it updates the running statistics of batch norms twice. *Without plan* counts profiled "
        "steps too. Planning is wall-clock time.",
        "![Time over plain](shapes.png)",
        "All runs of lowtide are bit-equal and within their budget in every step." if not faults else "Faults:",
        "\n".join(f"- {fault}" for fault in faults),
    ]
    header = (
        "variant", "time over plain", "settled", "highest peak", "steps over the budget", "bit-equal", "profiled",
        "without plan", "plans", "planning",
    )  # fmt: skip
    for name in dict.fromkeys(row.workload for row in rows):
        own = [row for row in rows if row.workload == name]
        first = own[0]
        plain_ms = 1000 * (first.plain_s or 0.0) / first.steps
        parts += [
            f"## {first.title}",
            f"{first.steps} steps of {first.sizes} different sizes. A plain step takes {plain_ms:.0f} ms on average; "
            f"the plain peak is {first.plain_peak_bytes / 2**20:.0f} MiB.",
            table(header, map(_cells, own)),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _faults(row: Row) -> list[str]:
    """Return the faults of a run of lowtide. A checkpoint may differ: it updates running statistics twice."""
    if row.variant == CHECKPOINT:
        return []
    title = f"{row.workload}, {row.name}"
    if row.error:
        return [f"{title}: {row.error.splitlines()[0]}"]
    faults = [f"{title}: warning: {text.splitlines()[0]}" for text in row.warnings]
    if row.share is not None and not row.held:
        share = 100 * (row.highest_bytes or 0) / (row.budget_bytes or 1)
        faults.append(f"{title}: {row.steps_over} of {row.steps} steps over the budget, up to {share:.1f} %")
    if not (row.equal_losses and row.equal_results):
        faults.append(f"{title}: {_equality(row)} bit-equal")
    return faults


def _equality(row: Row) -> str:
    if row.equal_losses is None:
        return "–"
    if row.equal_losses:
        return "yes" if row.equal_results else "only losses"
    return "only results" if row.equal_results else "**not**"


def _cells(row: Row) -> list[str]:
    def text(number: float | None, unit: str = "", form: str = "g") -> str:
        return "–" if number is None else f"{number:{form}}{unit}"

    if row.error:
        return [row.name, "stopped", *["–"] * 8]
    limit_bytes, of = (row.plain_peak_bytes, "plain") if row.budget_bytes is None else (row.budget_bytes, "budget")
    peak = None if row.highest_bytes is None else 100 * row.highest_bytes / limit_bytes
    return [
        row.name, text(row.ratio, " ×", ".2f"), text(row.settled, " ×", ".2f"), text(peak, f" % of {of}", ".1f"),
        text(row.steps_over), _equality(row), text(row.profiled_steps), text(row.unplanned_steps), text(row.plans),
        text(row.planning_s, " s", ".1f"),
    ]  # fmt: skip


def draw(rows: list[Row], path: Path) -> None:
    """Plot the time over plain by workload and variant; settled steps as lines in the bars."""
    names = list(dict.fromkeys(row.workload for row in rows))
    bars = list(dict.fromkeys(row.name for row in rows if row.variant != PLAIN))
    figure = plots.new_figure(2.5 + 1.7 * len(names), 4.2)
    axes = figure.add_subplot()
    width = 0.8 / max(1, len(bars))
    for i, bar in enumerate(bars):
        own = {row.workload: row for row in rows if row.name == bar}
        found = [(k, own[name]) for k, name in enumerate(names) if name in own and own[name].ratio is not None]
        xs = [k + (i - (len(bars) - 1) / 2) * width for k, _ in found]
        heights = [row.ratio or 0.0 for _, row in found]
        variant, share = next((row.variant, row.share) for row in rows if row.name == bar)
        is_tight = share is not None and share < max(SHARES)
        axes.bar(
            xs, heights, 0.92 * width, color=STYLES[variant]["color"], alpha=0.6 if is_tight else 1.0, label=bar,
            edgecolor="white", lw=0,
        )  # fmt: skip
        settled = [row.settled or 0.0 for _, row in found]
        label = "settled steps" if i == len(bars) - 1 else None
        axes.hlines(
            settled, [x - 0.46 * width for x in xs], [x + 0.46 * width for x in xs], "black", lw=1.6, label=label
        )
        for x, height in zip(xs, heights, strict=True):
            axes.annotate(
                f"{height:.2f}", (x, height), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7
            )
    axes.axhline(1, color="0.4", lw=1)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("time over plain, all steps and start-up")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Training with variable shapes; budgets as shares of the plain peak", fontsize=11, loc="left")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shapes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(STANDARD)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=", ".join(names))
    parser.add_argument("--steps", type=int, help=f"number of steps (default {STEPS}, {QUICK_STEPS} with --quick)")
    parser.add_argument("--quick", action="store_true", help="tiny models; gpt2 and detection with one budget")
    parser.add_argument("--out", type=Path, default=machine.RESULTS, help="directory of the results")
    parser.add_argument("--report", action="store_true", help="write shapes.md and shapes.png again from shapes.json")
    options = parser.parse_args(arguments)
    file = options.out / "shapes.json"
    if options.report:
        rows, description = read_rows(file, Row)
        write_rows(file, rows, description, page)
        draw(rows, file.with_suffix(".png"))
        return
    machine.keep_freed_memory("benchmarks.shapes")
    live_bytes()  # builds the counting allocator before processes need it
    description = machine.describe()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    rows = []
    for name in options.only or (["gpt2", "detection"] if options.quick else names):
        measured = measure(name, options.quick, steps, SHARES[:1] if options.quick else SHARES)
        rows += measured
        for row in measured:
            faults = "; ".join(_faults(row))
            print(f"{name:10} {row.name:22} {row.ratio or 0:.2f} × plain  {faults}", file=sys.stderr)
        write_rows(file, rows, description, page)
        draw(rows, file.with_suffix(".png"))
    print(file.with_suffix(".md"))


if __name__ == "__main__":
    main()
