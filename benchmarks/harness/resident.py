"""Resident memory of a variant: a process of its own, in which the allocator gives back what is freed.

Live tensor bytes are what lowtide budgets; what the system sees also has the allocator's and the kernels' share. The
child prepares the variant, takes a step, has the system forget its high-water mark, takes another, and says how far
it rose: above what was resident just before it, and above what was resident before anything was prepared, which also
has what preparing leaves behind (a solver's or a compiler's code, for example).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .records import ModelResult, Run

GIVING_BACK = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0",
}
"""One arena, and freed memory goes back to the system at once, so that resident means in use."""
_DEADLINE_S = 120
MODELS = ("gpt2", "llama", "resnet50")
VARIANTS = ("plain", "checkpoint", "planned@half", "planned@checkpoint", "planned@60")
"""A process for each takes a quarter of a minute: these stand for the others."""
ROOT = Path(__file__).parents[2]


def measure_resident(run: Run, catalogue: str, say: Callable[[str], None]) -> None:
    """Fill in `resident_bytes` for `VARIANTS` of `MODELS`, as far as they are in the run and worked."""
    run.settings["resident_allocator"] = GIVING_BACK
    for name, model in run.models.items():
        for variant, one in model.variants.items():
            if name in MODELS and variant in VARIANTS and one.error is None:
                say(f"    resident memory: {name} / {variant}")
                (one.resident_step_bytes, one.resident_bytes), note = _child(catalogue, name, variant, model)
                one.note = "; ".join(part for part in (one.note, note) if part)


def _child(catalogue: str, name: str, variant: str, model: ModelResult) -> tuple[tuple[int | None, int | None], str]:
    peaks = {n: one.peak_bytes for n, one in model.variants.items() if one.peak_bytes is not None}
    call = [sys.executable, "-m", "benchmarks.harness.resident", catalogue, name, variant, json.dumps(peaks)]
    try:
        done = subprocess.run(
            call,
            cwd=ROOT,
            env=os.environ | GIVING_BACK,
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


def resident_bytes(which: str) -> int:
    """`VmRSS`, now, or `VmHWM`, the most since it was forgotten."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {which}")


def child(catalogue: str, name: str, variant_name: str, peaks: dict[str, int]) -> tuple[int, int]:
    """How far a step raises this process's resident memory, above the moment before it and above the beginning."""
    import gc

    from .machine import one_quiet_thread
    from .models import CATALOGUES
    from .steps import Bench, step
    from .variants import named

    one_quiet_thread()
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
        Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
        ready = resident_bytes("VmRSS")
        step(forward)
        most = resident_bytes("VmHWM")
        return most - ready, most - before


if __name__ == "__main__":
    print(*child(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])))
