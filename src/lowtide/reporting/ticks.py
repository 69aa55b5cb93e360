"""Round tick positions for chart axes."""

from __future__ import annotations

import math

_RATIOS = (1, 1.05, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64)
_TIMES = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
_UNITS = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))


def round_ticks(high: float, count: int = 6) -> list[float]:
    """Return about `count` ticks from 0 to `high`, in steps of 1, 2 or 5 times a power of ten."""
    if high <= 0:
        return [0.0]
    rough = high / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda m: abs(math.log(power * m / rough)))
    return [step * k for k in range(int(high / step + 1e-9) + 1)]


def ratio_ticks(high: float) -> list[float]:
    """Return ratios from 1 to `high` with enough space between them on a logarithmic axis."""
    ticks: list[float] = []
    min_distance = math.log(max(high, 1.01)) / 8
    for ratio in _RATIOS:
        if ratio <= high and (not ticks or math.log(ratio / ticks[-1]) >= min_distance):
            ticks.append(float(ratio))
    return ticks


def byte_unit(nbytes: int) -> tuple[str, int]:
    """Return the name and the size in bytes of the unit for an axis up to `nbytes`."""
    return next((unit for unit in reversed(_UNITS) if nbytes >= 2 * unit[1]), _UNITS[0])


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the name and the length in seconds of the unit for an axis up to `seconds`."""
    return next((unit for unit in reversed(_TIMES) if seconds >= unit[1]), _TIMES[0])
