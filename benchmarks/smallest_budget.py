"""How little memory can each transformer be trained in? The smallest plan, beside a checkpoint on every block.

    python -m benchmarks.lower [--models NAME ...] [--out DIR]

Peaks only, so that a busy machine changes nothing: a metered plain step, one with `torch.utils.checkpoint` on every
block, and one under the plan for the smallest budget, with recomputing alone and with a disk. The floor is what no
schedule goes below, whatever it keeps, makes again or offloads: parameters, the gradients that are there by then, what
backward itself takes in one node, and the values that this node asks for.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import lowtide
from lowtide.fitting.plan import profile
from lowtide.planning import Problem
from lowtide.planning.smallest import floor_bytes

from .harness import machine
from .harness.models import STANDARD, Case, bert, gpt2, llama, t5, vit
from .harness.pages import table
from .harness.peers import EachBlock
from .harness.steps import Bench, step

CASES: dict[str, Case] = {
    **{name: STANDARD[name] for name in ("gpt2", "llama", "bert", "t5", "vit", "deep")},
    "gpt2, larger batch": gpt2(12, 128, 32, 128),
    "llama, larger batch": llama(12, 128, 32, 128),
    "bert, larger batch": bert(12, 128, 32, 128),
    "t5, larger batch": t5(6, 128, 32, 128),
    "vit, larger batch": vit(12, 128, 64),
}


@dataclass(frozen=True)
class Row:
    """One model. Bytes are without what lives beside the model and its batch."""

    model: str
    title: str
    plain_bytes: int
    checkpoint_bytes: int
    smallest_bytes: int
    """Metered, under the plan for the smallest budget."""
    disk_bytes: int
    """The same with a disk."""
    floor_bytes: int
    exact: bool

    @property
    def below(self) -> float:
        """How far the smaller of the two is below a checkpoint on every block."""
        return 1 - min(self.smallest_bytes, self.disk_bytes) / self.checkpoint_bytes

    @property
    def possible(self) -> float:
        """How far below it anything could be."""
        return 1 - self.floor_bytes / self.checkpoint_bytes


def row_of(name: str, case: Case) -> Row:
    bench = Bench(name, case)
    step(bench.loss)
    plain_bytes, plain = bench.metered(bench.loss)
    with EachBlock("checkpoint").applied(bench) as forward:
        checkpoint_bytes, bits = bench.metered(forward)
    exact = bits == plain
    beside = bench.other_bytes
    bench.reset()
    floor = floor_bytes(Problem(profile(bench.model, bench.batch))) - beside
    peaks = []
    for stores in (("device",), ("disk",)):
        peak, same = _smallest(bench, stores, plain)
        peaks.append(peak)
        exact &= same
    return Row(name, case.title, plain_bytes, checkpoint_bytes, peaks[0], peaks[1], floor, exact)


def _smallest(bench: Bench, stores: tuple[str, ...], plain: object) -> tuple[int, bool]:
    bench.reset()
    try:
        lowtide.plan(bench.model, bench.batch, 1, stores=stores, codecs=None)
    except lowtide.BudgetError as error:
        limit = error.smallest_bytes or 0
    bench.reset()
    plan = lowtide.plan(bench.model, bench.batch, limit, stores=stores, codecs=None)
    lowtide.fit(bench.model, plan=plan, stores=stores, codecs=None)
    try:
        peak, bits = bench.metered(bench.loss)
    finally:
        lowtide.unfit(bench.model)
    return peak, bits == plain


def page(rows: list[Row], where: dict[str, object]) -> str:
    """The table."""

    def share(part: int, row: Row) -> str:
        return f"{100 * part / row.plain_bytes:.1f} %"

    shown = [
        [
            row.title, share(row.checkpoint_bytes, row), share(row.smallest_bytes, row), share(row.disk_bytes, row),
            share(row.floor_bytes, row), f"{100 * row.below:.0f} %", f"{100 * row.possible:.0f} %",
            "to the bit" if row.exact else "NO",
        ]
        for row in rows
    ]  # fmt: skip
    quarter = [row.model for row in rows if row.below >= 0.25]
    barred = [row.model for row in rows if row.below < 0.25 and row.possible < 0.25]
    return (
        "# The least memory\n\n"
        f"`python -m benchmarks.lower` on {where.get('processor')}, {where.get('date')}. "
        "Peaks as shares of plain's.\n\n"
        f"A quarter or more below a checkpoint on every block: {', '.join(quarter) or 'none'}. "
        f"There the floor is less than a quarter below it, so that nothing could be: {', '.join(barred) or 'none'}. "
        f"Others: {', '.join(r.model for r in rows if r.model not in (*quarter, *barred)) or 'none'}.\n\n"
        + table(
            ("model", "checkpoint on every block", "smallest plan", "with a disk", "floor", "below the checkpoint",
             "the floor below it", "exact"),
            shown,
        )
    )  # fmt: skip


def main() -> None:
    """Measure, and write `lower.json` and `lower.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=machine.RESULTS)
    options = parser.parse_args()
    machine.one_quiet_thread()
    options.out.mkdir(parents=True, exist_ok=True)
    where = machine.describe()
    rows: list[Row] = []
    for name in options.models:
        rows.append(row_of(name, CASES[name]))
        print(f"{name:20} {100 * rows[-1].below:.0f} % below, floor {100 * rows[-1].possible:.0f} %", file=sys.stderr)
        document = {"machine": where, "rows": [asdict(row) for row in rows]}
        (options.out / "lower.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        (options.out / "lower.md").write_text(page(rows, where), encoding="utf-8")


if __name__ == "__main__":
    main()
