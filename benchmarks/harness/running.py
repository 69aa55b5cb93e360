"""The run: each model on the bench, all its variants in turn, round by round, results written as they come.

First every variant is prepared and takes a metered step (peak, bits); then rounds of timed steps, in alternating
order, each between two plain steps, so that whatever else the machine does falls on all alike. Variants on which
something is to be decided are timed more often than those that only draw a picture. A variant that fails is recorded
with its error.
"""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import machine
from .contract import NotApplicableError, Variant
from .models import Case
from .records import ModelResult, Run, VariantResult
from .steps import Bench, Bits, Forward, Seconds, step
from .variants import COMPILED_MODELS, DECIDED, named, set_up

Say = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """How often variants are timed, and how long all of it may take."""

    rounds: int
    """Of the variants that `DECIDED` names, on the models in `decided_on`."""
    few: int
    """Of all others."""
    decided_on: tuple[str, ...] = ()
    seconds: float | None = None
    """For all models together. A model's share is used up, or not, by whole rounds, after those of `few`."""

    def weight(self, model: str, variants: Sequence[str]) -> int:
        """A model's share of the time; compiling takes some."""
        return len(variants) * (2 if model in self.decided_on or model in COMPILED_MODELS else 1)


def run_models(
    cases: dict[str, Case],
    variants: dict[str, Sequence[str]],
    timing: Timing,
    out: Path,
    say: Say,
    settings: dict[str, object],
    finished: Callable[[Run, str], None] = lambda run, name: None,
) -> Run:
    """Measure each model's variants; after each model write `out` and call `finished`."""
    machine.one_quiet_thread()
    leave_imports_alone()
    how = set_up(way for ways in variants.values() for way in ways)
    run = Run(machine.describe(), {**asdict(timing), "set_up": how, **settings})
    started, weights = time.monotonic(), [timing.weight(name, variants[name]) for name in cases]
    for number, (name, case) in enumerate(cases.items(), 1):
        say(f"[{number}/{len(cases)}] {case.title}: {', '.join(variants[name])}")
        began = time.monotonic()
        left = sum(weights[number - 1 :])
        until = None
        if timing.seconds is not None:
            until = began + (started + timing.seconds - began) * weights[number - 1] / left
        rounds = timing.rounds if name in timing.decided_on else timing.few
        ways = [named(v) for v in variants[name]]
        run.models[name] = measure_model(Bench(name, case), ways, rounds, say, few=timing.few, until=until)
        gc.collect()
        run.save(out)
        finished(run, name)
        now = time.monotonic()
        rest = (now - started) * sum(weights[number:]) / sum(weights[:number])
        say(f"[{number}/{len(cases)}] {name}: {now - began:.0f} s; about {rest / 60:.0f} min left for the others")
    return run


def leave_imports_alone() -> None:
    """Have the garbage collector, which is called before each step, skip what is there before any model."""
    gc.collect()
    gc.freeze()


def measure_model(
    bench: Bench, variants: list[Variant], rounds: int, say: Say, *, few: int | None = None, until: float | None = None
) -> ModelResult:
    """All variants of one model, of which the first is plain: `rounds` of those to be decided on, `few` of others.

    The first `few` rounds have all of them. After `until` (of the monotonic clock) no others begin.
    """
    assert variants[0].name == "plain"
    few = rounds if few is None else min(few, rounds)
    result = ModelResult(bench.title, bench.base_bytes)
    step(bench.loss)  # the first of all is unlike the others
    reference: Bits | None = None
    for variant in variants:
        started = time.perf_counter()
        row = result.variants[variant.name] = VariantResult(variant.family)
        bits = _guarded(row, lambda v=variant, r=row: _prepare(bench, v, r))  # type: ignore[misc]
        reference = reference or bits
        if bits is not None and reference is not None:
            _compare(row, bits, reference)
        say(f"    {variant.name}: {row.error or f'prepared and metered in {time.perf_counter() - started:.1f} s'}")
    assert reference is not None, result.plain.error
    for k in range(rounds):
        if until is not None and k >= few and time.monotonic() > until:
            break
        due = [v for v in variants[1:] if k < few or v.name in DECIDED]
        started = time.perf_counter()
        _round(bench, due[:: -1 if k % 2 else 1], result, reference)
        say(f"    round {k + 1} of {rounds}: {len(due)} variants, {time.perf_counter() - started:.1f} s")
    for variant in variants:
        variant.finish(bench)
    bench.reset()
    return result


def _round(bench: Bench, due: list[Variant], result: ModelResult, reference: Bits) -> None:
    """A timed step of each between two plain ones; those on which nothing is to be decided share them by twos."""

    def plain() -> Seconds:
        took, _ = bench.timed(bench.loss)
        result.plain.cpu_s.append(took.cpu_s)
        result.plain.wall_s.append(took.wall_s)
        return took

    before = plain()
    for together in _between_plain_steps([v for v in due if result.variants[v.name].error is None]):
        taken: list[tuple[VariantResult, Seconds]] = []
        for variant in together:
            row = result.variants[variant.name]
            _guarded(row, lambda v=variant, r=row, t=taken: _timed(bench, v, r, t, reference))  # type: ignore[misc]
        after = plain()
        for row, took in taken:
            row.cpu_s.append(took.cpu_s)
            row.wall_s.append(took.wall_s)
            row.beside_cpu_s.append([before.cpu_s, after.cpu_s])
            row.beside_wall_s.append([before.wall_s, after.wall_s])
        before = after


def _between_plain_steps(due: list[Variant]) -> Iterator[list[Variant]]:
    """One to be decided on, or two others."""
    others = [v for v in due if v.name not in DECIDED]
    pairs = {id(pair[0]): pair for pair in (others[i : i + 2] for i in range(0, len(others), 2))}
    for variant in due:
        if variant.name in DECIDED:
            yield [variant]
        elif id(variant) in pairs:
            yield pairs[id(variant)]


def _guarded(row: VariantResult, work: Callable[[], Bits | None]) -> Bits | None:
    """What `work` gives; a failure goes to the record."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except Exception as error:
        # The first line: what follows in torch's errors are paths of this machine.
        row.error = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        if not isinstance(error, (NotApplicableError, MemoryError)):
            traceback.print_exc()
    return None


def _prepare(bench: Bench, variant: Variant, row: VariantResult) -> Bits:
    started = time.perf_counter()
    try:
        variant.prepare(bench)
        row.preparation_s = time.perf_counter() - started
        with variant.applied(bench) as forward:
            row.peak_bytes, bits = bench.metered(forward, variant.metering)
            _settle(bench, variant, forward)
        bench.peaks[variant.name] = row.peak_bytes
    finally:
        _said(variant, row)
    return bits


def _settle(bench: Bench, variant: Variant, forward: Forward) -> None:
    for _ in range(variant.settling_steps):
        bench.reset()
        step(forward)


def _timed(
    bench: Bench,
    variant: Variant,
    row: VariantResult,
    taken: list[tuple[VariantResult, Seconds]],
    reference: Bits,
) -> None:
    with variant.applied(bench) as forward:
        _settle(bench, variant, forward)
        took, loss = bench.timed(forward)
        _compare(row, bench.bits(loss), reference)
    taken.append((row, took))
    _said(variant, row)


def _compare(row: VariantResult, bits: Bits, reference: Bits) -> None:
    same = bits.loss == reference.loss and bits.gradients == reference.gradients
    row.exact = same and row.exact is not False
    row.buffers_equal = bits.buffers == reference.buffers and row.buffers_equal is not False


def _said(variant: Variant, row: VariantResult) -> None:
    """What the variant says of itself, by now."""
    row.note = variant.note
    if (said := variant.budgeted) is not None:
        row.asked_bytes, row.predicted_bytes = said.asked_bytes, said.predicted_bytes
        row.predicted_extra_s, row.bound_extra_s = said.predicted_extra_s, said.bound_extra_s
        row.predicted_plain_s = said.predicted_plain_s
        row.own_peak_bytes = said.own_peak_bytes
