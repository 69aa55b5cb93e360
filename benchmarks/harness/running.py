"""The run: each model on the bench, all its variants in turn, round by round, results written as they come.

First every variant is prepared and takes a metered step (peak, bits); then rounds of timed steps, in alternating
order, so that whatever else the machine does falls on all alike. A variant that fails is recorded with its error.
"""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from . import machine
from .contract import NotApplicableError, Variant
from .models import Case
from .records import ModelResult, Run, VariantResult
from .steps import Bench, Bits, step
from .variants import COMPILED, named

Say = Callable[[str], None]
TIMED_STEPS = 1
"""Of each variant in each round; the quickest counts."""


def run_models(
    cases: dict[str, Case],
    variants: Sequence[str],
    rounds: int,
    out: Path,
    say: Say,
    settings: dict[str, object],
) -> Run:
    """Measure, and write `out` after each model."""
    machine.one_quiet_thread()
    _leave_imports_alone()
    run = Run(
        machine.describe(), {"rounds": rounds, "timed_steps": TIMED_STEPS, "variants": list(variants), **settings}
    )
    for number, (name, case) in enumerate(cases.items(), 1):
        say(f"[{number}/{len(cases)}] {case.title}")
        started = time.perf_counter()
        ways = [named(v) for v in variants if not v.startswith("compile") or name in COMPILED]
        run.models[name] = measure_model(Bench(name, case), ways, rounds, say)
        gc.collect()
        run.save(out)
        say(f"[{number}/{len(cases)}] {name}: {time.perf_counter() - started:.0f} s")
    return run


def _leave_imports_alone() -> None:
    """Have the garbage collector, which is called before each step, skip what is there before any model."""
    gc.collect()
    gc.freeze()


def measure_model(bench: Bench, variants: list[Variant], rounds: int, say: Say) -> ModelResult:
    """All variants of one model; the first is plain."""
    assert variants[0].name == "plain"
    result = ModelResult(bench.title, bench.base_bytes)
    step(bench.loss)  # the first of all is unlike the others
    reference: Bits | None = None
    for variant in variants:
        say(f"    {variant.name}")
        row = result.variants[variant.name] = VariantResult(variant.family)
        bits = _guarded(row, lambda v=variant, r=row: _prepare(bench, v, r))  # type: ignore[misc]
        reference = reference or bits
        if bits is not None and reference is not None:
            _compare(row, bits, reference)
    assert reference is not None, result.plain.error
    for k in range(rounds):
        say(f"    round {k + 1} of {rounds}")
        for variant in variants[:: -1 if k % 2 else 1]:
            row = result.variants[variant.name]
            if row.error is None:
                _guarded(row, lambda v=variant, r=row: _round(bench, v, r, reference))  # type: ignore[misc]
    for variant in variants:
        variant.finish(bench)
    bench.reset()
    return result


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
        bench.peaks[variant.name] = row.peak_bytes
    finally:
        _said(variant, row)
    return bits


def _round(bench: Bench, variant: Variant, row: VariantResult, reference: Bits) -> None:
    taken = []
    with variant.applied(bench) as forward:
        for _ in range(variant.settling_steps):
            bench.reset()
            step(forward)
        for _ in range(TIMED_STEPS):
            cpu_s, wall_s, bits = bench.timed(forward)
            taken.append((cpu_s, wall_s))
            _compare(row, bits, reference)
    row.cpu_s.append(min(cpu_s for cpu_s, _ in taken))
    row.wall_s.append(min(wall_s for _, wall_s in taken))
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
        row.own_peak_bytes = said.own_peak_bytes
