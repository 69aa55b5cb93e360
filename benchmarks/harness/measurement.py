"""Measurement of models: all variants of a model in rounds.

First every variant is prepared and runs a metered step (peak, bits). Then come rounds of timed steps, in alternating
order, each step between two plain steps, so that load on the machine affects all variants alike. The main variants get
more rounds than the others. A variant that fails is recorded with its error. Results are saved after each model.
"""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import machine
from .base import NotApplicableError, Variant
from .models import Case
from .records import ModelResult, Run, VariantResult
from .steps import Bench, Bits, Forward, Seconds, step
from .variants import COMPILED_MODELS, MAIN, named

Log = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """Number of rounds, and the time limit."""

    rounds: int
    """Rounds of the variants in `variants.MAIN` on the models in `main_models`."""
    few: int
    """Rounds of all others."""
    main_models: tuple[str, ...] = ()
    seconds: float | None = None
    """Time limit for all models. The first `few` rounds of a model always run."""

    def weight(self, model: str, variants: Sequence[str]) -> int:
        """Return a model's weight in the division of the time; compiled models need time to compile."""
        return len(variants) * (2 if model in self.main_models or model in COMPILED_MODELS else 1)


def run_models(
    cases: dict[str, Case],
    variants: Mapping[str, Sequence[str]],
    timing: Timing,
    out: Path,
    log: Log,
    settings: dict[str, object],
    finished: Callable[[Run, str], None] = lambda run, name: None,
) -> Run:
    """Measure each model's variants; after each model write `out` and call `finished`."""
    machine.use_one_thread()
    freeze_imports()
    run = Run(machine.describe(), {**asdict(timing), **settings})
    started, weights = time.monotonic(), [timing.weight(name, variants[name]) for name in cases]
    for number, (name, case) in enumerate(cases.items(), 1):
        log(f"[{number}/{len(cases)}] {case.title}: {', '.join(variants[name])}")
        began = time.monotonic()
        left = sum(weights[number - 1 :])
        until = None
        if timing.seconds is not None:
            until = began + (started + timing.seconds - began) * weights[number - 1] / left
        rounds = timing.rounds if name in timing.main_models else timing.few
        model_variants = [named(v) for v in variants[name]]
        run.models[name] = measure_model(Bench(name, case), model_variants, rounds, log, few=timing.few, until=until)
        gc.collect()
        run.save(out)
        finished(run, name)
        now = time.monotonic()
        rest = (now - started) * sum(weights[number:]) / sum(weights[:number])
        log(f"[{number}/{len(cases)}] {name}: {now - began:.0f} s; about {rest / 60:.0f} min left for the other models")
    return run


def freeze_imports() -> None:
    """Exclude all objects that exist now from garbage collection, which runs before each step."""
    gc.collect()
    gc.freeze()


def measure_model(
    bench: Bench, variants: list[Variant], rounds: int, log: Log, *, few: int | None = None, until: float | None = None
) -> ModelResult:
    """Measure all variants of one model; the first must be plain.

    The first `few` rounds run all variants, the others only those in `variants.MAIN`. After `until`, on the monotonic
    clock, no round beyond the first `few` starts.
    """
    assert variants[0].name == "plain"
    few = rounds if few is None else min(few, rounds)
    result = ModelResult(bench.title, bench.base_bytes)
    step(bench.loss)  # warm-up
    reference: Bits | None = None
    for variant in variants:
        started = time.perf_counter()
        row = result.variants[variant.name] = VariantResult(variant.family)
        bits = _guarded(row, lambda v=variant, r=row: _prepare(bench, v, r))  # type: ignore[misc]
        reference = reference or bits
        if bits is not None and reference is not None:
            _compare(row, bits, reference)
        log(f"    {variant.name}: {row.error or f'prepared and metered in {time.perf_counter() - started:.1f} s'}")
    assert reference is not None, result.plain.error
    for k in range(rounds):
        if until is not None and k >= few and time.monotonic() > until:
            break
        due = [v for v in variants[1:] if k < few or v.name in MAIN]
        started = time.perf_counter()
        _round(bench, due[:: -1 if k % 2 else 1], result, reference)
        log(f"    round {k + 1} of {rounds}: {len(due)} variants, {time.perf_counter() - started:.1f} s")
    for variant in variants:
        variant.finish(bench)
    bench.reset()
    return result


def _round(bench: Bench, due: list[Variant], result: ModelResult, reference: Bits) -> None:
    """Run one timed step of each variant between two plain steps; two variants outside `MAIN` share a pair."""

    def plain() -> Seconds:
        took, _ = bench.timed(bench.loss)
        result.plain.cpu_s.append(took.cpu_s)
        result.plain.wall_s.append(took.wall_s)
        return took

    before = plain()
    for group in _groups([v for v in due if result.variants[v.name].error is None]):
        taken: list[tuple[VariantResult, Seconds]] = []
        for variant in group:
            row = result.variants[variant.name]
            _guarded(row, lambda v=variant, r=row, t=taken: _timed(bench, v, r, t, reference))  # type: ignore[misc]
        after = plain()
        for row, took in taken:
            row.cpu_s.append(took.cpu_s)
            row.wall_s.append(took.wall_s)
            row.beside_cpu_s.append([before.cpu_s, after.cpu_s])
            row.beside_wall_s.append([before.wall_s, after.wall_s])
        before = after


def _groups(due: list[Variant]) -> Iterator[list[Variant]]:
    """Yield one variant of `MAIN`, or two others, at a time."""
    others = [v for v in due if v.name not in MAIN]
    pairs = {id(pair[0]): pair for pair in (others[i : i + 2] for i in range(0, len(others), 2))}
    for variant in due:
        if variant.name in MAIN:
            yield [variant]
        elif id(variant) in pairs:
            yield pairs[id(variant)]


def _guarded(row: VariantResult, work: Callable[[], Bits | None]) -> Bits | None:
    """Return the result of `work`; store an error in the row."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work()
    except Exception as error:
        # Only the first line: the other lines of torch's errors contain paths of this machine.
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
        _copy_budget(variant, row)
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
    _copy_budget(variant, row)


def _compare(row: VariantResult, bits: Bits, reference: Bits) -> None:
    same = bits.loss == reference.loss and bits.gradients == reference.gradients
    row.exact = same and row.exact is not False
    row.buffers_equal = bits.buffers == reference.buffers and row.buffers_equal is not False


def _copy_budget(variant: Variant, row: VariantResult) -> None:
    row.note = variant.note
    if (one := variant.budget_result) is not None:
        row.asked_bytes, row.predicted_bytes = one.asked_bytes, one.predicted_bytes
        row.predicted_extra_s, row.bound_extra_s = one.predicted_extra_s, one.bound_extra_s
        row.predicted_plain_s = one.predicted_plain_s
        row.own_peak_bytes = one.own_peak_bytes
