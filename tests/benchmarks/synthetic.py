"""Synthetic runs: known time and peak of each variant, with noise, outliers and varying load."""

from __future__ import annotations

import random
from collections.abc import Mapping

from benchmarks.harness.records import ModelResult, Run, VariantResult

MIB = 2**20
MACHINE = {
    "processor": "made up",
    "threads": 1,
    "versions": {"python": "3", "lowtide": "0"},
    "allocator": {},
    "load": 0.0,
    "date": "2000-01-01T00:00:00",
}
TRUTH: dict[str, tuple[str, float, float]] = {
    # variant: family, time and peak, as multiples of plain's
    "plain": ("plain", 1.0, 1.0),
    "checkpoint": ("torch checkpoint", 1.30, 0.45),
    "sac": ("torch SAC", 1.15, 0.60),
    "offload": ("torch offload", 1.02, 1.0),
    "compile": ("torch compile", 0.80, 0.50),
    "rule:every1": ("lowtide rules", 1.28, 0.45),
    "online@60": ("lowtide online", 1.25, 0.60),
    "planned@80": ("lowtide planned", 1.00, 0.80),
    "planned@60": ("lowtide planned", 1.05, 0.60),
    "planned@45": ("lowtide planned", 1.12, 0.45),
    "planned@smallest": ("lowtide planned", 1.60, 0.30),
}


def _step(rng: random.Random, load: float, noise: float) -> float:
    outlier = 1.3 if rng.random() < 0.05 else 1.0  # in one step: does not cancel in ratios
    return load * outlier * (1 + rng.gauss(0, noise))


def made_up_run(
    seed: int,
    *,
    noise: float = 0.01,
    rounds: int = 9,
    models: int = 3,
    slower: Mapping[tuple[str, str], float] | None = None,
    larger: Mapping[tuple[str, str], float] | None = None,
    truth: Mapping[str, tuple[str, float, float]] = TRUTH,
) -> Run:
    """Return a run. `slower` and `larger` are factors for the time and the peak of (model, variant)."""
    rng = random.Random(seed)
    run = Run(dict(MACHINE), {"rounds": rounds, "variants": list(truth), "timed_steps": 1, "catalogue": "made up"})
    for k in range(models):
        name = f"model{k}"
        model = run.models[name] = ModelResult(f"Model {k}", 10 * MIB)
        for variant, (family, _, share) in truth.items():
            peak = int(100 * MIB * share * (larger or {}).get((name, variant), 1.0))
            budgeted = "@" in variant and "lowtide" in family
            model.variants[variant] = VariantResult(
                family, peak_bytes=peak, exact=True, buffers_equal=True, asked_bytes=peak if budgeted else None
            )
        for _ in range(rounds):
            load = 1 + abs(rng.gauss(0, 0.2))  # in the whole round: cancels in ratios
            before = _step(rng, load, noise)
            for variant, (_, seconds, _) in truth.items():
                one = model.variants[variant]
                took = seconds * _step(rng, load, noise) * (slower or {}).get((name, variant), 1.0)
                after = _step(rng, load, noise)
                for times, beside in ((one.cpu_s, one.beside_cpu_s), (one.wall_s, one.beside_wall_s)):
                    times.append(took)
                    beside.append([before, after])
                before = after
            model.plain.beside_cpu_s.clear()
    return run
