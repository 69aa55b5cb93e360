"""`taylor_test`: check a gradient by a Taylor expansion along one direction.

If g is the gradient of J at x, the residual J(x + h·d) − J(x) − h·⟨g, d⟩ falls with h². Otherwise it falls
with h. The test measures this order, with one evaluation of J for each step size h. Small errors in g need
small steps, because the curvature of J hides them. Too small steps give only rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import ArgumentError
from ._arrays import as_numpy, flatten, library, namespace, unflatten


@dataclass(frozen=True, slots=True)
class TaylorResult:
    """Residuals of the expansion, and the order at which they fall."""

    steps: tuple[float, ...]
    values: tuple[float, ...]
    """J(x + h·d) for each step size."""
    residuals: tuple[float, ...]
    """The absolute value of J(x + h·d) − J(x) − h·⟨g, d⟩."""
    orders: tuple[float, ...]
    """Log of the ratio of consecutive residuals, divided by that of the steps. 2 for a correct gradient."""
    rounding: float
    """Residuals up to this value are rounding noise."""

    @property
    def order(self) -> float:
        """The median order. Infinite if every residual is rounding noise, as for a linear J."""
        kept = [order for order, after in zip(self.orders, self.residuals[1:], strict=True) if after > self.rounding]
        return float(np.median(kept)) if kept else math.inf

    @property
    def passed(self) -> bool:
        """True if the order is above 1.9."""
        return self.order > 1.9

    def __str__(self) -> str:
        lines = ["       h   residual  order"]
        shown = ("", *(f"{order:6.2f}" for order in self.orders))
        lines += [f"{h:8.1e}   {r:8.2e} {order}" for h, r, order in zip(self.steps, self.residuals, shown, strict=True)]
        return "\n".join([*lines, f"order {self.order:.2f}: {'passed' if self.passed else 'failed'}"])


def taylor_test(
    function: Callable[[Any], float],
    gradient: Any,
    x: Any,
    direction: Any = None,
    *,
    steps: Sequence[float] = (1e-2, 5e-3, 2.5e-3, 1.25e-3),
    seed: int = 0,
) -> TaylorResult:
    """Compare `gradient` with finite differences of `function` at `x` along `direction`, by default random.

    `steps` are the step sizes, largest first. Choose them so that the residuals are above rounding noise.

    >>> taylor_test(lambda x: float((x**3).sum()), 3 * np.ones(4) ** 2, np.ones(4)).passed
    True
    """
    arrays, skeleton = flatten(x)
    gradients = [as_numpy(g) for g in flatten(gradient)[0]]
    shapes = [tuple(a.shape) for a in arrays]
    if not arrays or [g.shape for g in gradients] != shapes:
        raise ArgumentError(
            f"the gradient has arrays of shapes {[g.shape for g in gradients]}, but x has {shapes}: they must agree"
        )
    if direction is None:
        rng = np.random.default_rng(seed)
        directions = [rng.standard_normal(a.shape) for a in arrays]
    else:
        directions = [as_numpy(d) for d in flatten(direction)[0]]
    slope = sum(float(np.sum(g * d)) for g, d in zip(gradients, directions, strict=True))
    start = float(function(x))
    values = [
        float(function(unflatten(skeleton, [_moved(a, h, d) for a, d in zip(arrays, directions, strict=True)])))
        for h in steps
    ]
    residuals = [abs(value - start - h * slope) for h, value in zip(steps, values, strict=True)]
    precision = max(float(np.finfo(as_numpy(a).dtype).eps) for a in arrays)
    rounding = 100 * precision * max(abs(start), *map(abs, values))
    orders = [
        math.log(before / after) / math.log(h / smaller) if before > 0 and after > 0 else math.inf
        for before, after, h, smaller in zip(residuals, residuals[1:], steps, steps[1:], strict=False)
    ]
    return TaylorResult(tuple(steps), tuple(values), tuple(residuals), tuple(orders), rounding)


def _moved(array: Any, h: float, direction: Any) -> Any:
    """Return `array` + h · `direction` in the library and dtype of `array`."""
    moved = as_numpy(array) + h * direction
    lib = library(array)
    if lib == "torch":
        return array.detach().new_tensor(moved)
    return namespace("jax").asarray(moved, dtype=array.dtype) if lib == "jax" else moved.astype(array.dtype)
