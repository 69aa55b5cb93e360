"""Resident memory of a variant, in its own process, with an allocator that returns freed memory to the system.

lowtide budgets live tensor bytes. Resident memory also contains memory of the allocator and of kernels. The child
process prepares the variant, runs a step, resets the high-water mark, runs another step and prints the rise: above the
resident memory just before this step, and above that before preparation, which also contains memory of preparation
(for example the code of a solver or a compiler).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .records import ModelResult, Run

RETURN_FREED_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0",
}
"""One arena, and freed memory returns to the system at once, so that resident memory is memory in use."""
_DEADLINE_S = 120
MODELS = ("gpt2", "llama", "resnet50")
VARIANTS = ("plain", "checkpoint", "planned@half", "planned@checkpoint", "planned@60")
"""A selection: each process takes a quarter of a minute."""
ROOT = Path(__file__).parents[2]


def measure_resident(run: Run, catalogue: str, log: Callable[[str], None]) -> None:
    """Set `resident_bytes` for the `VARIANTS` of `MODELS` that the run measured without an error."""
    run.settings["resident_allocator"] = RETURN_FREED_MEMORY
    for name, model in run.models.items():
        for variant, one in model.variants.items():
            if name in MODELS and variant in VARIANTS and one.error is None:
                log(f"    resident memory: {name} / {variant}")
                (one.resident_step_bytes, one.resident_bytes), note = _child(catalogue, name, variant, model)
                one.note = "; ".join(part for part in (one.note, note) if part)


def _child(catalogue: str, name: str, variant: str, model: ModelResult) -> tuple[tuple[int | None, int | None], str]:
    peaks = {n: one.peak_bytes for n, one in model.variants.items() if one.peak_bytes is not None}
    call = [sys.executable, "-m", "benchmarks.harness.resident", catalogue, name, variant, json.dumps(peaks)]
    try:
        done = subprocess.run(
            call,
            cwd=ROOT,
            env=os.environ | RETURN_FREED_MEMORY,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=True,
        )
        step_bytes, all_bytes = map(int, done.stdout.splitlines()[-1].split())
        return (step_bytes, all_bytes), ""
    except subprocess.TimeoutExpired:
        return (None, None), f"resident memory not measured within {_DEADLINE_S} s"
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        return (None, None), f"resident memory not measured: {' '.join(last)}"


def resident_bytes(field: str) -> int:
    """Return `VmRSS`, the current value, or `VmHWM`, the high-water mark since its last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def child(catalogue: str, name: str, variant_name: str, peaks: dict[str, int]) -> tuple[int, int]:
    """Return the rise of resident memory in a step: since just before the step, and since before preparation."""
    import gc

    from .machine import use_one_thread
    from .models import CATALOGUES
    from .steps import Bench, step
    from .variants import named

    use_one_thread()
    bench = Bench(name, CATALOGUES[catalogue][name])
    bench.peaks |= peaks
    variant = named(variant_name)
    before = resident_bytes("VmRSS")
    variant.prepare(bench)
    with variant.applied(bench) as forward:
        for _ in range(1 + variant.settling_steps):
            bench.reset()
            step(forward)
        bench.reset()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
        before_step = resident_bytes("VmRSS")
        step(forward)
        peak = resident_bytes("VmHWM")
        return peak - before_step, peak - before


if __name__ == "__main__":
    print(*child(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
