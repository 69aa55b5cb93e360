"""`taylor_test`: is this gradient the gradient of that function?

If g is the gradient of J at x, then J(x + h·d) − J(x) − h·⟨g, d⟩ falls with h²; if it is not, only with h.
The test measures the order along one direction. It works on NumPy, torch and JAX arrays and containers of
them, and costs one evaluation of J for each step size. An error in g shows once h is so small that the
error outweighs the curvature of J: take small steps to find small errors, but not so small that all is rounding.
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
    """Residuals of the expansion, and the order with which they fall."""

    steps: tuple[float, ...]
    values: tuple[float, ...]
    """J(x + h·d) for each step size."""
    residuals: tuple[float, ...]
    """The absolute value of J(x + h·d) − J(x) − h·⟨g, d⟩."""
    orders: tuple[float, ...]
    """log of the ratio of neighbouring residuals over that of the steps: 2 for a right gradient."""
    rounding: float
    """Residuals at or below this are rounding noise."""

    @property
    def order(self) -> float:
        """The median order; infinite when every residual is rounding noise (J is linear along d)."""
        kept = [order for order, after in zip(self.orders, self.residuals[1:], strict=True) if after > self.rounding]
        return float(np.median(kept)) if kept else math.inf

    @property
    def passed(self) -> bool:
        """Whether the order is above 1.9."""
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
    """Compare `gradient` with the behaviour of `function` around `x` along `direction` (by default random).

    Choose `steps`, largest first, so that the function is neither linear nor lost in rounding over them.

    >>> taylor_test(lambda x: float((x**3).sum()), 3 * np.ones(4) ** 2, np.ones(4)).passed
    True
    """
    arrays, skeleton = flatten(x)
    gradients = [as_numpy(g) for g in flatten(gradient)[0]]
    shapes = [tuple(a.shape) for a in arrays]
    if not arrays or [g.shape for g in gradients] != shapes:
        raise ArgumentError(
            f"the gradient has arrays of shapes {[g.shape for g in gradients]}, the point {shapes}: they must agree"
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
    """`array` + h · `direction`, in its library and dtype."""
    moved = as_numpy(array) + h * direction
    kind = library(array)
    if kind == "torch":
        return array.detach().new_tensor(moved)
    return namespace("jax").asarray(moved, dtype=array.dtype) if kind == "jax" else moved.astype(array.dtype)
