"""Why the steps of a fitted model have not followed a plan."""

from __future__ import annotations

from collections.abc import Collection

from .signature import Signature
from .step_family import StepFamily

_DIFFERENCES = {
    "inputs": "number of dimensions, dimensions of size 1, dtypes or requires_grad of the inputs",
    "training": "train() or eval() of modules",
    "requires_grad": "requires_grad of parameters",
    "has_gradients": "whether gradients exist before the step",
    "autocast": "autocast",
    "others": "flags of the other fitted models",
}


def why_unplanned(signatures: Collection[Signature], families: Collection[StepFamily], steps: int) -> str | None:
    """Return why none of `steps` has followed a plan, or None if there was no step.

    `signatures` and `families` are the step signatures that are still remembered, and their families.
    """
    if not steps:
        return None
    left = sum(family.left_plans for family in families)
    if left:
        return (
            f"{left} {'step' if left == 1 else 'steps'} did not run the ops of the step before, for example because of "
            "control flow that depends on data, and continued without a plan"
        )
    if any(family.has_no_plan for family in families):
        return "no plan fits into the budget (a warning named the smallest budget with a plan)"
    if steps == 1:
        return "there was only one step; the first step with a step signature is profiled, later ones follow a plan"
    if len(families) == 1:
        return "all steps began before the first one was profiled; later steps follow a plan"
    return (
        f"no step signature was repeated. The signatures differ in {' and '.join(_differences(signatures))}. Steps "
        "with equal signatures follow a plan: for example, pad batches to a few lengths"
    )


def _differences(signatures: Collection[Signature]) -> list[str]:
    """Return the parts in which the signatures differ."""
    return [
        description
        for field, description in _DIFFERENCES.items()
        if len({getattr(signature, field) for signature in signatures}) > 1
    ]
