"""Error messages of the engine contain names, numbers and a remedy (Rule 11)."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import lowtide

NONE = lowtide.KeepNone()


def test_a_changed_parameter_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with lowtide.saving(NONE):
        loss = model(torch.randn(2, 4)).square().sum()
    used = model[2].weight._version
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(lowtide.StaleSourceError) as caught:
        loss.backward()
    text = str(caught.value)
    assert (
        f"the parameter '2.weight' was modified in place (it is at version {used + 1}, forward used version {used})"
        in text
    )
    assert "aten.addmm.default in module '2' (op 3) has to be replayed with it" in text
    assert "Change a copy instead" in text
    assert isinstance(caught.value, RuntimeError)  # what plain PyTorch would raise


def test_a_changed_batch_is_described() -> None:
    x = torch.randn(3, 5)
    w = torch.randn(3, 5, requires_grad=True)
    with lowtide.saving(NONE):
        loss = (x.sin() * w).exp().sum()
    x += 1
    with pytest.raises(lowtide.StaleSourceError, match=r"a float32 tensor of shape \(3, 5\) from outside the scope"):
        loss.backward()


def test_a_changed_kept_value_is_named_by_its_op() -> None:
    w = torch.randn(3, 3, requires_grad=True)

    def keep_products(op: lowtide.OpInfo) -> lowtide.Decision:
        return lowtide.Decision.KEEP if "mm" in op.name else lowtide.Decision.RECOMPUTE

    with lowtide.saving(keep_products):
        y = w @ w
        loss = (y + 1).sin().sum()
    with torch.no_grad():
        y.zero_()
    with pytest.raises(lowtide.StaleSourceError, match=r"made by aten.mm.default \(op 0\), was modified in place"):
        loss.backward()


@pytest.mark.parametrize("policy", [lowtide.KeepAll(), NONE])
def test_an_error_of_plain_pytorch_is_raised_too(policy: lowtide.Policy) -> None:
    """Saved-tensor hooks disable the version check of torch; lowtide checks instead."""
    w = torch.randn(3, requires_grad=True)
    with lowtide.saving(policy):
        loss = (w * w.detach().clone().requires_grad_()).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_a_kept_output_that_was_overwritten() -> None:
    w = torch.randn(3, requires_grad=True)
    with lowtide.saving(lowtide.KeepAll()):
        y = w.exp()
        y.mul_(2)
    with pytest.raises(lowtide.StaleSourceError, match=r"made by aten.exp.default.*version 0 was saved") as caught:
        y.sum().backward()
    assert "Modify a copy" in str(caught.value)


def test_a_recomputed_output_that_was_overwritten_is_still_correct() -> None:
    """Plain PyTorch raises an error here. A recompute is still correct."""
    w = torch.randn(3, requires_grad=True)
    with lowtide.saving(NONE):
        y = w.exp()
        y.mul_(2)
    y.sum().backward()
    assert torch.equal(w.grad, 2 * w.exp().detach())


def test_scopes_are_not_reused_while_open() -> None:
    scope = lowtide.saving(NONE)
    with scope, pytest.raises(lowtide.ArgumentError, match="open already"), scope:
        pass
    with scope:  # scopes may follow each other
        pass


def test_report_before_any_scope() -> None:
    import subprocess
    import sys

    code = "import lowtide\ntry: lowtide.report()\nexcept lowtide.ArgumentError as e: print(e)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "nothing to report yet" in out


def test_a_rule_without_layers_warns() -> None:
    x = torch.randn(3, requires_grad=True)
    with (
        pytest.warns(lowtide.LowtideWarning, match=r"EveryN\(n=2.*found no layers.*layers=\["),
        lowtide.saving(lowtide.EveryN(2)),
    ):
        x.sin().sum()


def test_errors_are_one_tree() -> None:
    from lowtide import _errors

    for name, error_class in vars(_errors).items():
        if (
            isinstance(error_class, type)
            and issubclass(error_class, Exception)
            and error_class.__module__ == _errors.__name__
        ):
            assert error_class is lowtide.LowtideWarning or issubclass(error_class, lowtide.LowtideError), name
            assert getattr(lowtide, name) is error_class
            assert name in (_errors.__doc__ or ""), name


def test_a_replay_with_another_layout_is_an_error() -> None:
    """The second call of the kernel returns another layout."""
    state = {"n": 0}

    @torch.library.custom_op("lowtide_test::flip_layout", mutates_args=())
    def flip_layout(x: torch.Tensor) -> torch.Tensor:
        state["n"] += 1
        return x.clone() if state["n"] == 1 else x.t().contiguous().t()

    flip_layout.register_autograd(lambda ctx, g: g)
    lowtide.allow_replay("lowtide_test::flip_layout")
    x = torch.randn(3, 4, requires_grad=True)
    with lowtide.saving(NONE):
        loss = flip_layout(x).sin().sum()
    with pytest.raises(lowtide.ReplayMismatchError, match=r"strides \(.*SaveOps\('lowtide_test.flip_layout.default'\)"):
        loss.backward()


def test_budget_errors_can_be_sent_to_other_processes() -> None:
    error = lowtide.BudgetError("too small", budget_bytes=5, smallest_bytes=7, explanation="much")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is lowtide.BudgetError
    assert (str(copy), vars(copy)) == (str(error), vars(error))
