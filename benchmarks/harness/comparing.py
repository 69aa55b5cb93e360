"""Two runs of the benchmarks: what became slower, larger, inexact or impossible, beyond noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .noise import LEAST_ROUNDS, between_runs
from .records import ModelResult, Run, VariantResult

LARGER = 0.01
"""Peaks of the same code differ by less than this share."""


@dataclass(frozen=True)
class Finding:
    """One thing that differs."""

    model: str
    variant: str
    regressed: bool
    sentence: str

    def __str__(self) -> str:
        return f"{'WORSE ' if self.regressed else 'better'}  {self.model} / {self.variant}: {self.sentence}"


@dataclass(frozen=True)
class Comparison:
    """What two runs have to say to each other."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    """What could not be compared."""
    compared: int

    @property
    def regressed(self) -> bool:
        """Whether anything is worse."""
        return any(finding.regressed for finding in self.findings)

    def __str__(self) -> str:
        lines = [*map(str, self.findings), *(f"note    {note}" for note in self.notes)]
        worse = sum(finding.regressed for finding in self.findings)
        return "\n".join([*lines, f"{self.compared} variants compared: {worse} worse, "
                                  f"{len(self.findings) - worse} better, beyond noise"])  # fmt: skip


def compare(old: Run, new: Run) -> Comparison:
    """Everything that both runs measured."""
    notes = [
        f"{what} differs: {old.machine.get(what)!r} and {new.machine.get(what)!r}"
        for what in ("processor", "allocator", "threads", "versions")
        if old.machine.get(what) != new.machine.get(what)
    ]
    if (
        fewest := min((len(m.plain.cpu_s) for run in (old, new) for m in run.models.values()), default=0)
    ) < LEAST_ROUNDS:
        notes.append(f"{fewest} rounds are too few to compare times: at least {LEAST_ROUNDS} are needed")
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
        for variant in dict.fromkeys([*before.variants, *after.variants]):
            if variant not in before.variants or variant not in after.variants:
                notes.append(f"{name} / {variant} is only in the {'new' if variant in after.variants else 'old'} run")
                continue
            compared += 1
            findings += _differences(name, variant, before, after)
    return Comparison(tuple(findings), tuple(notes), compared)


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
                f"× {after.ratio(variant):.3f} of plain's time, was × {before.ratio(variant):.3f} "
                f"({100 * (time.ratio - 1):+.1f} %, sure within {100 * (time.least - 1):+.1f} to "
                f"{100 * (time.most - 1):+.1f} %)",
            )
    yield from _bytes(model, variant, old, new)


def _bytes(model: str, variant: str, old: VariantResult, new: VariantResult) -> Iterator[Finding]:
    """Peaks; where there is a budget, how much of it is used is the planner's business, but not more than all."""
    if new.asked_bytes is None:
        pairs = [("peak", old.peak_bytes, new.peak_bytes)]
    elif variant.endswith("@smallest"):
        pairs = [("smallest budget", old.asked_bytes, new.asked_bytes)]
    else:
        pairs = []
    for what, before, after in pairs:
        if before and after and abs(after / before - 1) > LARGER:
            yield Finding(model, variant, after > before, f"{what} {after:,} bytes, was {before:,}")
    if (was_over := _is_over(old)) != _is_over(new):
        now = f"peak {new.peak_bytes:,} bytes, budget {new.asked_bytes:,}"
        yield Finding(
            model, variant, not was_over, f"{'within its budget now' if was_over else 'over its budget'}: {now}"
        )


def _is_over(one: VariantResult) -> bool:
    return one.asked_bytes is not None and (one.peak_bytes or 0) > one.asked_bytes
