"""Measure the smallest budget of transformers, compared with a checkpoint on every block.

    python -m benchmarks.smallest_budget [--models NAME ...] [--out DIR] [--report]

Four steps of each model are metered: plain, with `torch.utils.checkpoint` on every block, and with the plan for the
smallest budget, without and with a disk. No times are measured, so load on the machine does not matter. The floor is a
lower bound on the peak of any schedule: parameters, gradients that exist by then, memory of one backward node, and the
values that this node unpacks. Writes smallest_budget.json and smallest_budget.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lowtide
from lowtide.fitting.plan import profile
from lowtide.planning import Problem
from lowtide.planning.smallest import floor_bytes

from .harness import machine
from .harness.markdown import table
from .harness.models import STANDARD, Case, bert, gpt2, llama, t5, vit
from .harness.peers import EachBlock
from .harness.rows import rewrite_page, write_rows
from .harness.steps import Bench, Bits, step

CASES: dict[str, Case] = {
    **{name: STANDARD[name] for name in ("gpt2", "llama", "bert", "t5", "vit", "deep")},
    "gpt2, larger batch": gpt2(12, 128, 32, 128),
    "llama, larger batch": llama(12, 128, 32, 128),
    "bert, larger batch": bert(12, 128, 32, 128),
    "t5, larger batch": t5(6, 128, 32, 128),
    "vit, larger batch": vit(12, 128, 64),
}
MUCH_SMALLER = 0.25
"""The page lists models whose peak is smaller than the checkpoint's by at least this share."""


@dataclass(frozen=True)
class Row:
    """Peaks of one model. Bytes of other tensors in the process are subtracted."""

    model: str
    title: str
    plain_bytes: int
    checkpoint_bytes: int
    smallest_bytes: int
    """Metered peak with the plan for the smallest budget."""
    disk_bytes: int
    """The same with a disk."""
    floor_bytes: int
    exact: bool

    @property
    def reduction(self) -> float:
        """Reduction of the checkpoint's peak by the smaller of the two plans, as a share."""
        return 1 - min(self.smallest_bytes, self.disk_bytes) / self.checkpoint_bytes

    @property
    def possible_reduction(self) -> float:
        """Reduction of the checkpoint's peak to the floor, as a share."""
        return 1 - self.floor_bytes / self.checkpoint_bytes


def measure(name: str, case: Case) -> Row:
    """Return the peaks of one model."""
    bench = Bench(name, case)
    step(bench.loss)
    plain_bytes, plain_bits = bench.metered(bench.loss)
    with EachBlock("checkpoint").applied(bench) as forward:
        checkpoint_bytes, bits = bench.metered(forward)
    exact = bits == plain_bits
    other_bytes = bench.other_bytes
    bench.reset()
    floor = floor_bytes(Problem(profile(bench.model, bench.batch))) - other_bytes
    peaks = []
    for stores in (("device",), ("disk",)):
        peak, bits = _measure_smallest(bench, stores)
        peaks.append(peak)
        exact &= bits == plain_bits
    return Row(name, case.title, plain_bytes, checkpoint_bytes, peaks[0], peaks[1], floor, exact)


def _measure_smallest(bench: Bench, stores: tuple[str, ...]) -> tuple[int, Bits]:
    """Return peak and bits of a step with the plan for the smallest budget."""
    bench.reset()
    try:
        lowtide.plan(bench.model, bench.batch, "1 B", stores=stores, codecs=None)
    except lowtide.BudgetError as error:
        smallest_bytes = error.smallest_bytes or 0
    else:
        raise AssertionError("found a plan for a budget of one byte")
    bench.reset()
    plan = lowtide.plan(bench.model, bench.batch, f"{smallest_bytes} B", stores=stores, codecs=None)
    lowtide.fit(bench.model, plan=plan, stores=stores, codecs=None)
    try:
        return bench.metered(bench.loss)
    finally:
        lowtide.unfit(bench.model)


def page(rows: list[Row], where: dict[str, Any]) -> str:
    """Return the page."""

    def share(nbytes: int, row: Row) -> str:
        return f"{100 * nbytes / row.plain_bytes:.1f} %"

    lines = [
        [
            row.title, share(row.checkpoint_bytes, row), share(row.smallest_bytes, row), share(row.disk_bytes, row),
            share(row.floor_bytes, row), f"{100 * row.reduction:.0f} %", f"{100 * row.possible_reduction:.0f} %",
            "yes" if row.exact else "**no**",
        ]
        for row in rows
    ]  # fmt: skip
    much = [row.model for row in rows if row.reduction >= MUCH_SMALLER]
    impossible = [row.model for row in rows if row.reduction < MUCH_SMALLER and row.possible_reduction < MUCH_SMALLER]
    others = [row.model for row in rows if row.model not in (*much, *impossible)]
    limit = f"{100 * MUCH_SMALLER:g} %"
    header = ("model", "checkpoint on every block", "smallest plan", "with a disk", "floor", "plan below checkpoint",
              "floor below checkpoint", "bit-equal")  # fmt: skip
    parts = [
        "# Smallest budgets",
        f"Written by `python -m benchmarks.smallest_budget` on {where.get('processor')}, {where.get('date')}.",
        "Peaks are shares of plain's peak. The floor is a lower bound on the peak of any schedule.",
        f"- Peak at least {limit} below that of a checkpoint on every block: {'; '.join(much) or 'none'}.\n"
        f"- Impossible, because the floor is less than {limit} below it: {'; '.join(impossible) or 'none'}.\n"
        f"- Possible but not reached: {'; '.join(others) or 'none'}.",
        table(header, lines),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smallest_budget",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = list(CASES)
    parser.add_argument("--models", nargs="+", metavar="NAME", choices=names, default=names, help="; ".join(names))
    parser.add_argument("--out", type=Path, default=machine.RESULTS, help="directory of the results")
    parser.add_argument(
        "--report", action="store_true", help="write smallest_budget.md again from smallest_budget.json"
    )
    options = parser.parse_args()
    file = options.out / "smallest_budget.json"
    if options.report:
        rewrite_page(file, Row, page)
        return
    machine.use_one_thread()
    description = machine.describe()
    rows: list[Row] = []
    for name in options.models:
        row = measure(name, CASES[name])
        rows.append(row)
        below = f"{100 * row.reduction:.0f} % below checkpoint, floor {100 * row.possible_reduction:.0f} % below"
        print(f"{name:20} {below}", file=sys.stderr)
        write_rows(file, rows, description, page)
    print(file.with_suffix(".md"))


if __name__ == "__main__":
    main()
