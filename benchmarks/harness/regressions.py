"""Comparison of two runs: which variants became slower, larger, inexact or impossible, beyond noise. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from .machine import machine_line
from .markdown import table
from .noise import ERRORS_BETWEEN_RUNS, FLOOR, MIN_ROUNDS, Change, between_runs
from .records import ModelResult, Run, VariantResult

MAIN_PLANS = ("planned@half", "planned@checkpoint")
"""Each gets a verdict for every model that has it: half of plain's activations, and the peak of `checkpoint`."""
MIB = 2**20
PEAK_TOLERANCE = 0.01
"""Peaks of unchanged code differ by less than this share."""


CHECK_HEADER = (
    "model",
    "plan",
    "plain peak, MiB",
    "peak, MiB",
    "overhead old",
    "overhead new",
    "difference",
    "noise",
    "verdict",
)


@dataclass(frozen=True)
class PlanCheck:
    """Overhead of one of `MAIN_PLANS` on one model in both runs."""

    model: str
    variant: str
    plain_peak_bytes: int | None
    """Peak of a plain step in the new run."""
    peak_bytes: int | None
    """Peak of the variant in the new run."""
    change: Change | None
    reason: str = ""
    """Reason for a missing `change`."""

    @property
    def compared(self) -> bool:
        """Whether both runs have the plan, in enough rounds."""
        return self.change is not None and math.isfinite(self.change.noise)

    @property
    def slower(self) -> bool:
        """Whether the new run is slower by more than 1 % of a plain step, beyond noise."""
        return self.change is not None and self.change.slower

    @property
    def verdict(self) -> str:
        """Result in words."""
        if self.change is None:
            return f"not compared: {self.reason}"
        if math.isinf(self.change.noise):
            return f"not compared: fewer than {MIN_ROUNDS} rounds"
        if self.change.slower:
            return "SLOWER"
        if self.change.faster:
            return "faster"
        return "not slower" if self.change.surely_not_slower else "undecided"

    @property
    def cells(self) -> list[str]:
        """Cells of a table, in the order of `CHECK_HEADER`."""
        peaks = ["" if peak is None else f"{peak / MIB:.1f}" for peak in (self.plain_peak_bytes, self.peak_bytes)]
        if self.change is None:
            return [self.model, self.variant, *peaks, "", "", "", "", self.verdict]
        one = self.change
        noise = "" if math.isinf(one.noise) else f"± {100 * one.noise:.1f} pp"
        overheads = [f"{100 * (ratio - 1):.1f} %" for ratio in (one.old, one.new)]
        return [self.model, self.variant, *peaks, *overheads, f"{100 * one.difference:+.1f} pp", noise, self.verdict]


@dataclass(frozen=True)
class Finding:
    """One difference between the runs."""

    model: str
    variant: str
    regressed: bool
    sentence: str

    def __str__(self) -> str:
        return f"{'WORSE ' if self.regressed else 'better'}  {self.model} / {self.variant}: {self.sentence}"


@dataclass(frozen=True)
class Comparison:
    """Differences between two runs."""

    checks: tuple[PlanCheck, ...]
    findings: tuple[Finding, ...]
    """Differences of all variants, `MAIN_PLANS` included."""
    notes: tuple[str, ...]
    """Results that could not be compared."""
    compared: int
    """Number of variants in both runs."""

    @property
    def regressed(self) -> bool:
        """Whether any result is worse."""
        return any(finding.regressed for finding in self.findings)

    @property
    def summary(self) -> str:
        """Number of slower plans, and of all differences."""
        checks = [one for one in self.checks if one.compared]
        verdicts = Counter(one.verdict for one in checks)
        slower = ", ".join(f"{one.model} / {one.variant}" for one in checks if one.slower)
        worse = sum(finding.regressed for finding in self.findings)
        return (
            f"{verdicts['SLOWER']} of {len(checks)} plans ({', '.join(MAIN_PLANS)}) are slower by more than "
            f"{100 * FLOOR:g} % of a plain step, beyond noise{f': {slower}' if slower else ''}. "
            f"{verdicts['faster']} are faster, {verdicts['not slower']} are not slower, {verdicts['undecided']} are "
            f"undecided, {len(self.checks) - len(checks)} were not compared.\n"
            f"{self.compared} variants compared: {worse} worse, {len(self.findings) - worse} better, beyond noise."
        )

    def __str__(self) -> str:
        rows = [CHECK_HEADER, *(one.cells for one in self.checks)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [*map(str, self.findings), *(f"note    {note}" for note in self.notes)]
        return "\n".join([*lines, self.summary])

    def page(self, old: Run, new: Run) -> str:
        """Return the comparison of `old` and `new` as a Markdown page."""
        parts = [
            "# Comparison of two benchmark runs",
            self.summary.replace("\n", "\n\n"),
            f"- Old: {machine_line(old.machine)}.\n- New: {machine_line(new.machine)}.",
            "Written by `python -m benchmarks compare OLD NEW --output FILE`.",
            "## Is any plan slower?",
            "*planned@half*: the budget is parameters, buffers and batch, and half of the rest of plain's peak. "
            "*planned@checkpoint*: the budget is the peak of `torch.utils.checkpoint` on every block. Peaks are those "
            "of the new run. An overhead is the time above a plain step of the same run, as a share of that step; the "
            "difference is in percentage points (pp). *Noise* is "
            f"{ERRORS_BETWEEN_RUNS:g} standard errors of the difference.",
            f"- **SLOWER**, **faster**: the difference exceeds {100 * FLOOR:g} pp and the noise.\n"
            f"- **not slower**: even with the noise added, the difference is at most {100 * FLOOR:g} pp.\n"
            "- **undecided**: the noise is too large for either.",
            table(CHECK_HEADER, (one.cells for one in self.checks)),
            "## All differences beyond noise",
            table(
                ("", "model", "variant", "difference"),
                (["worse" if one.regressed else "better", one.model, one.variant, one.sentence]
                 for one in self.findings),
            )
            if self.findings
            else "None.",
            "## Not compared" if self.notes else "",
            "\n".join(f"- {note}" for note in self.notes),
        ]  # fmt: skip
        return "\n\n".join(part for part in parts if part) + "\n"


def compare(old: Run, new: Run) -> Comparison:
    """Compare all models and variants that both runs measured."""
    notes = [
        f"{key} differs: {old.machine.get(key)!r} and {new.machine.get(key)!r}"
        for key in ("processor", "allocator", "threads", "versions")
        if old.machine.get(key) != new.machine.get(key)
    ]
    rounds = min((len(model.plain.cpu_s) for run in (old, new) for model in run.models.values()), default=0)
    if rounds < MIN_ROUNDS:
        notes.append(f"{rounds} rounds are too few to compare times: at least {MIN_ROUNDS} are needed")
    checks: list[PlanCheck] = []
    findings: list[Finding] = []
    compared = 0
    for name in dict.fromkeys([*old.models, *new.models]):
        if name not in old.models or name not in new.models:
            notes.append(f"{name} is only in the {'new' if name in new.models else 'old'} run")
            continue
        before, after = old.models[name], new.models[name]
        if before.title != after.title:
            notes.append(f"{name} has another size: {before.title!r} and {after.title!r}")
            continue
        checks += [
            _check(name, variant, before, after)
            for variant in MAIN_PLANS
            if variant in before.variants or variant in after.variants
        ]
        for variant in dict.fromkeys([*before.variants, *after.variants]):
            if variant not in before.variants or variant not in after.variants:
                notes.append(f"{name} / {variant} is only in the {'new' if variant in after.variants else 'old'} run")
                continue
            compared += 1
            findings += _differences(name, variant, before, after)
    return Comparison(tuple(checks), tuple(findings), tuple(notes), compared)


def _check(model: str, variant: str, before: ModelResult, after: ModelResult) -> PlanCheck:
    row = after.variants.get(variant)
    peaks = after.plain.peak_bytes, None if row is None else row.peak_bytes
    for run, result in (("old", before), ("new", after)):
        if variant not in result.measured() or not result.plain.measured:
            return PlanCheck(model, variant, *peaks, None, f"not measured in the {run} run")
    return PlanCheck(model, variant, *peaks, between_runs(before, after, variant))


def _differences(model: str, variant: str, before: ModelResult, after: ModelResult) -> Iterator[Finding]:
    old, new = before.variants[variant], after.variants[variant]
    if (old.error is None) != (new.error is None):
        failed = new.error is not None
        yield Finding(model, variant, failed, f"fails now: {new.error}" if failed else "works now")
        return
    if new.error is not None:
        return
    if old.exact != new.exact:
        yield Finding(model, variant, not new.exact, "bit-equal to plain now" if new.exact else "no longer bit-equal")
    if variant != "plain" and old.measured and new.measured:
        time = between_runs(before, after, variant)
        if time.slower or time.faster:
            yield Finding(
                model,
                variant,
                time.slower,
                f"× {time.new:.3f} of plain's time, was × {time.old:.3f} ({100 * time.difference:+.1f} % of a "
                f"plain step, noise ± {100 * time.noise:.1f} %)",
            )
    yield from _peak_differences(model, variant, old, new)


def _peak_differences(model: str, variant: str, old: VariantResult, new: VariantResult) -> Iterator[Finding]:
    """Yield larger and smaller peaks. A plan may use more of its budget than before, but not exceed it."""
    if new.asked_bytes is None:
        label, before, after = "peak", old.peak_bytes, new.peak_bytes
    elif variant.endswith("@smallest"):
        label, before, after = "smallest budget", old.asked_bytes, new.asked_bytes
    else:
        label, before, after = "", None, None
    if before and after and abs(after / before - 1) > PEAK_TOLERANCE:
        yield Finding(model, variant, after > before, f"{label} {after:,} bytes, was {before:,}")
    if (was_over := _is_over(old)) != _is_over(new):
        now = f"peak {new.peak_bytes:,} bytes, budget {new.asked_bytes:,}"
        yield Finding(
            model, variant, not was_over, f"{'within its budget now' if was_over else 'over its budget'}: {now}"
        )


def _is_over(one: VariantResult) -> bool:
    return one.asked_bytes is not None and (one.peak_bytes or 0) > one.asked_bytes
