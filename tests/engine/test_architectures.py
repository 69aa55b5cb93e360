"""Rule 1 on real architectures: bit-equal loss, gradients, buffers and generator under every rule."""

from __future__ import annotations

import pytest

import lowtide

from .steps import assert_equal, every_rule, run_step
from .zoo import ZOO, build


@pytest.mark.parametrize("name", ZOO)
def test_every_rule_is_exact(name: str) -> None:
    model, batch = build(name)
    plain = run_step(model, batch)
    assert any(g is not None and g.abs().sum() > 0 for g in plain.grads.values())
    for rule, policy in every_rule().items():
        ours = run_step(model, batch, lowtide.saving(policy), backward_inside=rule == "EveryN(2)")
        try:
            assert_equal(plain, ours)
        except AssertionError as error:
            raise AssertionError(f"{name} under {rule}: {error}") from error
        if rule == "KeepAll":
            assert lowtide.report().replayed_ops == 0
        if rule == "KeepNone":
            assert lowtide.report().replayed_ops > 0


@pytest.mark.parametrize("name", ZOO)
def test_every_recipe_verifies(name: str) -> None:
    """Verification (Rule 10) pins no op of these models, and the verified run is exact."""
    model, batch = build(name)
    plain = run_step(model, batch)
    ours = run_step(model, batch, lowtide.saving(lowtide.KeepNone(), verify=True))
    assert_equal(plain, ours)
    assert [p for p in lowtide.report().pinned if "bits" in p.why or "written" in p.why] == []


def test_zoo_is_wide_enough() -> None:
    assert len(ZOO) >= 15
