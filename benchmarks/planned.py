"""What a plan costs in time: seven models at the peaks of the usual schemes, at half the activations, and with plenty.

    python -m benchmarks.planned [--models gpt2,llama,...] [--rounds N] [--quick] [--out DIR]

One thread. For each model, plain PyTorch, `torch.utils.checkpoint` on every block, the same keeping matrix products
and attention (SAC), and lowtide's plans are run in turn, round by round, and minima of the process's CPU time are
compared (wall time is beside it), because the machine may be shared. A plan is made once; each round fits the model
with it, takes the two steps that lowtide itself measures, and times those that follow. Peaks are those of a step of
their own, by a meter that is not part of the engine's bookkeeping; gradients are compared by their hashes, bit by bit.
Writes planned.json, planned.md and planned.png.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import lowtide
from benchmarks.harness.blocks import each_block_checkpointed
from benchmarks.harness.machine import RESULTS, keep_freed_memory, one_quiet_thread
from benchmarks.harness.models import SMALL as MODELS, TINY, Batch, Case
from benchmarks.harness.peers import CHECKPOINT, SELECTIVE
from benchmarks.harness.steps import (
    Forward,
    base_of,
    clear,
    gradients_hash,
    loss_of,
    process_bytes,
    step,
    storage_bytes,
)
from lowtide.profiling.meter import PeakMeter

MIB = 2**20
AT_CHECKPOINT, AT_SAC, AT_HALF, AMPLE = "at checkpoint's peak", "at SAC's peak", "half the activations", "ample"
SCHEMES = {"checkpoint": CHECKPOINT, "SAC": SELECTIVE}
PLANNED = (AT_CHECKPOINT, AT_SAC, AT_HALF, AMPLE)
TIMED_STEPS = 2  # of each variant in each round

# -- measuring ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """One variant of one model."""

    peak_bytes: int = 0
    peak_by_lowtide_bytes: int | None = None
    asked_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_ratio: float | None = None
    bound_ratio: float | None = None
    profiled_step_s: float | None = None  # what the plan takes for plain
    planning_s: float | None = None
    solve_s: float | None = None
    solver: str | None = None
    replayed_ops: int | None = None
    exact: bool | None = None
    followed: bool | None = None
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    failure: str | None = None


def forward_of(model: nn.Module, batch: Batch) -> Forward:
    return lambda: loss_of(model(**batch))


@contextlib.contextmanager
def scheme(model: nn.Module, name: str) -> Iterator[None]:
    """The model under a scheme of torch's."""
    with each_block_checkpointed(model, SCHEMES[name]) if name in SCHEMES else contextlib.nullcontext():
        yield


def metered(model: nn.Module, batch: Batch) -> int:
    clear(model)
    with PeakMeter(base_of(model, batch)) as meter:
        step(forward_of(model, batch))
    return meter.peak_bytes


def timed(model: nn.Module, batch: Batch, row: Row) -> None:
    clear(model)
    for _ in range(TIMED_STEPS):
        model.zero_grad(set_to_none=True)
        wall, cpu = time.perf_counter(), time.process_time()
        step(forward_of(model, batch))
        row.cpu_s.append(time.process_time() - cpu)
        row.wall_s.append(time.perf_counter() - wall)


class Measured:
    """One model and all its variants."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.title = name, case.title
        self.model, self.batch = case.build()
        self.base_bytes = storage_bytes(base_of(self.model, self.batch))
        self.rows = {name: Row() for name in ("plain", *SCHEMES, *PLANNED)}
        self.plans: dict[str, lowtide.Plan] = {}
        self.reference = ""

    def run(self, rounds: int) -> None:
        self._peaks()
        for name in PLANNED:
            self._plan(name)
        for k in range(rounds):
            for name in list(self.rows)[:: -1 if k % 2 else 1]:
                if name in self.plans:
                    self._timed_plan(name)
                elif name not in PLANNED:
                    with scheme(self.model, name):
                        timed(self.model, self.batch, self.rows[name])
        clear(self.model)

    def _peaks(self) -> None:
        for name in ("plain", *SCHEMES):
            with scheme(self.model, name):
                self.rows[name].peak_bytes = metered(self.model, self.batch)
            hashed = gradients_hash(self.model)
            self.reference = self.reference or hashed
            self.rows[name].exact = hashed == self.reference
        clear(self.model)

    def _budget(self, name: str) -> int:
        plain = self.rows["plain"].peak_bytes
        here = {
            AT_CHECKPOINT: self.rows["checkpoint"].peak_bytes,
            AT_SAC: self.rows["SAC"].peak_bytes,
            AT_HALF: self.base_bytes + (plain - self.base_bytes) // 2,
            AMPLE: 2 * plain,
        }[name]
        return here + max(0, process_bytes() - self.base_bytes)  # what others hold is counted too

    def _plan(self, name: str) -> None:
        row = self.rows[name]
        clear(self.model)
        row.asked_bytes = self._budget(name)
        started = time.perf_counter()
        try:
            plan = lowtide.plan(self.model, self.batch, row.asked_bytes)
            row.planning_s = time.perf_counter() - started
            row.solve_s, row.solver, row.replayed_ops = plan.solve_s, plan.solver, plan.replayed_ops
            row.predicted_bytes = plan.predicted_peak_bytes
            row.predicted_ratio = plan.predicted_step_s / plan.plain_step_s
            row.bound_ratio = plan.bound_step_s / plan.plain_step_s
            row.profiled_step_s = plan.plain_step_s
            lowtide.fit(self.model, plan=plan, budget=row.asked_bytes)
            row.peak_bytes = metered(self.model, self.batch)
            row.exact = gradients_hash(self.model) == self.reference
            row.peak_by_lowtide_bytes = lowtide.report(self.model).measured_peak_bytes
            self.plans[name] = plan
        except Exception as error:
            row.failure = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        finally:
            lowtide.unfit(self.model)

    def _timed_plan(self, name: str) -> None:
        row = self.rows[name]
        lowtide.fit(self.model, plan=self.plans[name], budget=row.asked_bytes)
        try:
            for _ in range(2):  # these are measured by lowtide, which takes time
                self.model.zero_grad(set_to_none=True)
                step(forward_of(self.model, self.batch))
            timed(self.model, self.batch, row)
            report = lowtide.report(self.model)
            followed = report.online_steps == 0 and report.plan is self.plans[name]
            row.followed = followed and row.followed is not False
            row.exact = bool(row.exact) and gradients_hash(self.model) == self.reference
        finally:
            lowtide.unfit(self.model)

    # -- what came out --------------------------------------------------------------------------------

    def ratio(self, name: str, clock: str = "cpu_s") -> float:
        """Of minima, to plain."""
        times = getattr(self.rows[name], clock)
        return min(times) / min(getattr(self.rows["plain"], clock)) if times else float("nan")

    def rescaled(self, name: str, ratio: float | None) -> float:
        """What the plan says of its profiled step, said of the plain step that was measured."""
        seconds = ((ratio or 1) - 1) * (self.rows[name].profiled_step_s or 0)
        return 1 + seconds / min(self.rows["plain"].cpu_s, default=float("nan"))

    def verdicts(self) -> list[tuple[str, bool, str]]:
        over = {name: 100 * (self.ratio(name) - 1) for name in self.rows}
        checkpointed, selective = over["checkpoint"], over["SAC"]
        a, b, c, d = (over[name] for name in PLANNED)
        return [
            (
                "at checkpoint's peak at most 0.5 × its overhead",
                a <= 0.5 * checkpointed,
                f"{a:+.1f} % against {checkpointed:+.1f} %",
            ),
            (
                "at SAC's peak at most 0.3 × its overhead, or 1 %",
                b <= max(0.3 * selective, 1),
                f"{b:+.1f} % against {selective:+.1f} %",
            ),
            ("at half the activations at most 5 %", c <= 5, f"{c:+.1f} %"),
            ("with plenty at most 1 %", d <= 1, f"{d:+.1f} %"),
        ]

    def faults(self) -> list[str]:
        """What must not be, whatever the times are."""
        found = []
        for name in PLANNED:
            row = self.rows[name]
            if row.failure:
                found.append(f"{name}: {row.failure}")
                continue
            if not row.exact:
                found.append(f"{name}: gradients differ from plain's")
            found += [
                f"{name}: peak {peak:,} over the budget {row.asked_bytes:,} bytes"
                for peak in (row.peak_bytes, row.peak_by_lowtide_bytes or 0)
                if peak > (row.asked_bytes or 0)
            ]
            if row.followed is False:
                found.append(f"{name}: the plan was not followed")
        return found

    def record(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "base_bytes": self.base_bytes,
            "plain_cpu_s": min(self.rows["plain"].cpu_s, default=None),
            "variants": {
                name: {**asdict(row), "cpu_ratio": self.ratio(name), "wall_ratio": self.ratio(name, "wall_s")}
                for name, row in self.rows.items()
            },
            "verdicts": [{"claim": c, "holds": h, "numbers": n} for c, h, n in self.verdicts()],
            "faults": self.faults(),
        }

    def markdown(self) -> str:
        plain = self.rows["plain"]
        lines = [
            f"### {self.title}",
            "",
            f"Plain: {min(plain.cpu_s, default=0):.2f} s a step, peak {plain.peak_bytes / MIB:.0f} MiB, of which "
            f"{self.base_bytes / MIB:.0f} are parameters, buffers and batch.",
            "",
            "| | peak, % of plain | time, × plain | wall, × plain | predicted | the plan says | bound | "
            "asked / predicted / measured, MiB | planned in, s (solver) | exact |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
        ]
        for name, row in self.rows.items():
            label = f"lowtide, {name}" if name in PLANNED else name
            if row.failure:
                lines.append(f"| {label} | | | | | | | {(row.asked_bytes or 0) / MIB:.1f} | | failed |")
                continue
            peaks, planned, predicted, said, bound = f"{row.peak_bytes / MIB:.1f}", "", "", "", ""
            if row.asked_bytes is not None and row.predicted_bytes is not None:
                peaks = f"{row.asked_bytes / MIB:.1f} / {row.predicted_bytes / MIB:.1f} / {peaks}"
                planned = f"{row.planning_s:.1f} ({row.solve_s:.1f})"
                predicted = f"{self.rescaled(name, row.predicted_ratio):.3f}"
                said, bound = f"{row.predicted_ratio:.3f}", f"{self.rescaled(name, row.bound_ratio):.3f}"
            lines.append(
                f"| {label} | {100 * row.peak_bytes / plain.peak_bytes:.0f} | {self.ratio(name):.3f} | "
                f"{self.ratio(name, 'wall_s'):.3f} | {predicted} | {said} | {bound} | {peaks} | {planned} | "
                f"{'yes' if row.exact else 'no'} |"
            )
        lines.append("")
        for claim, holds, numbers in self.verdicts():
            lines.append(f"- {'holds' if holds else 'does not hold'}: {claim} ({numbers})")
        lines += [f"- FAULT: {fault}" for fault in self.faults()]
        return "\n".join([*lines, ""])


# -- showing ------------------------------------------------------------------------------------------


def picture(measured: list[Measured], path: Path, subtitle: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(measured) + 1)
    height = -(-(len(measured) + 1) // columns)
    figure, axes = plt.subplots(height, columns, figsize=(4.2 * columns, 3.9 * height), squeeze=False)
    panels = list(axes.flat)
    for one, ax in zip(measured, panels, strict=False):
        plain = one.rows["plain"].peak_bytes
        there = [n for n in PLANNED if one.rows[n].cpu_s and one.rows[n].predicted_ratio is not None]
        ours = sorted((100 * one.rows[n].peak_bytes / plain, 100 * (one.ratio(n) - 1)) for n in there)
        said = [
            (100 * (r.predicted_bytes or 0) / plain, 100 * (one.rescaled(n, r.predicted_ratio) - 1))
            for n, r in ((n, one.rows[n]) for n in there)
        ]
        ax.axhline(0, color="0.75", lw=1, zorder=0)
        ax.plot(*zip(*ours, strict=True), "o-", color="C0", lw=2, ms=7, label="lowtide, measured") if ours else None
        ax.plot(*zip(*said, strict=True), "o", mfc="none", color="C0", ms=12, label="its prediction") if said else None
        for name, mark, color in (("checkpoint", "s", "C3"), ("SAC", "D", "C1"), ("plain", "*", "0.3")):
            at = 100 * one.rows[name].peak_bytes / plain
            ax.plot([at], [100 * (one.ratio(name) - 1)], mark, color=color, ms=9, label=name)
        ax.set_title(one.title, fontsize=10)
        ax.set_xlabel("peak, % of plain's")
        ax.set_ylabel("time over plain, %")
        ax.margins(0.12)
        ax.grid(alpha=0.25)
    for ax in panels[len(measured) :]:
        ax.axis("off")
    if measured:
        handles, labels = panels[0].get_legend_handles_labels()
        panels[len(measured)].legend(handles, labels, loc="center", frameon=False, fontsize=12)
    figure.suptitle(f"Time against memory in one training step\n{subtitle}", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def summary(measured: list[Measured]) -> str:
    claims = ("≤ 0.5 × checkpoint's", "≤ 0.3 × SAC's, or 1 %", "≤ 5 % at half", "≤ 1 % with plenty")
    lines = ["| overhead | " + " | ".join(claims) + " |", "|---|" + "---|" * len(claims)]
    for one in measured:
        cells = [f"{'holds' if holds else '**does not**'}: {numbers}" for _, holds, numbers in one.verdicts()]
        lines.append(f"| {one.title.split(',')[0]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def write(measured: list[Measured], out: Path, setting: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    document = {"setting": setting, "models": {one.name: one.record() for one in measured}}
    (out / "planned.json").write_text(json.dumps(document, indent=1) + "\n")
    note = (
        "Predicted and bound are the plan's seconds beyond a plain step, over the plain step measured here; what the "
        "plan itself says relates them to the step that it profiled. Half the activations: parameters, buffers and "
        "batch, and half of what a plain step takes beyond these."
    )
    parts = ["# What a plan costs", "", setting, "", note, "", summary(measured), *(one.markdown() for one in measured)]
    (out / "planned.md").write_text("\n".join(parts).rstrip() + "\n")
    picture(measured, out / "planned.png", setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {','.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=3, help=f"of {TIMED_STEPS} timed steps each (default 3)")
    parser.add_argument("--quick", action="store_true", help="one tiny model, one round: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go (default benchmarks/results)")
    options = parser.parse_args()
    names = options.models.split(",")
    if unknown := set(names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    keep_freed_memory("benchmarks.planned")
    one_quiet_thread()
    rounds = 1 if options.quick else options.rounds
    setting = (
        f"lowtide {lowtide.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()} CPU, 1 thread, allocator keeping freed memory; "
        f"minima of CPU time, {rounds} rounds × {TIMED_STEPS} steps"
    )
    print(setting, flush=True)
    measured = []
    for name, case in {"tiny": TINY["gpt2"]}.items() if options.quick else ((n, MODELS[n]) for n in names):
        started = time.perf_counter()
        one = Measured(name, case)
        one.run(rounds)
        one.model.cpu()
        measured.append(one)
        print(f"\n{one.markdown()}\n({time.perf_counter() - started:.0f} s)", flush=True)
        del one.model, one.batch, one.plans
        gc.collect()
        write(measured, options.out, setting)
    print(f"\n{summary(measured)}")
    if any(one.faults() for one in measured):
        sys.exit("there are faults")


if __name__ == "__main__":
    main()
