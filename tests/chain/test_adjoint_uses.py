"""`grad` with torch and JAX, its report and progress, the Taylor test, and the wave example."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from lowtide import ArgumentError
from lowtide.chain import grad, taylor_test

from .problems import X0, adjoint_step, step


def test_torch():
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X0)
    weight = torch.nn.Parameter(torch.tensor(0.9, dtype=torch.float64))

    def backward(x, lam, i):
        x = x.detach().requires_grad_()
        torch.sin(weight * x).backward(lam)
        return x.grad

    lam, _ = grad(
        lambda x, i: torch.sin(weight * x), backward, x, 25, adjoint=lambda x: 2 * x, slots=3, check_determinism=True
    )
    leaf = x.clone().requires_grad_()
    y = leaf
    reference = torch.nn.Parameter(weight.detach().clone())
    for _ in range(25):
        y = torch.sin(reference * y)
    (y**2).sum().backward()
    assert lam.grad_fn is None
    assert torch.allclose(lam, leaf.grad, rtol=1e-12)
    assert torch.allclose(weight.grad, reference.grad, rtol=1e-12)


def test_jax_with_a_step_that_donates_its_input():
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    body = lambda x, i: jnp.sin(x) + 0.1 * x
    forward = jax.jit(body, donate_argnums=0)

    @jax.jit
    def backward(x, lam, i):
        return jax.vjp(lambda x: body(x, i), x)[1](lam)[0]

    x = jnp.linspace(0.0, 1.0, 16)
    lam, _ = grad(forward, backward, x, 20, adjoint=jnp.ones(16), slots=3)

    def loss(x):
        for i in range(20):
            x = body(x, i)
        return x.sum()

    assert jnp.allclose(lam, jax.grad(loss)(x), rtol=1e-4)
    assert not x.is_deleted()


def test_report_text():
    _, report = grad(step, adjoint_step, X0, 100, adjoint=X0, slots=5)
    assert report.factor == 4.16
    lines = str(report).splitlines()
    assert lines[0] == "100 steps reversed by revolve"
    assert lines[1].strip() == "forward steps  416 (4.16 × n), predicted 416"
    assert lines[3].strip() == "slots          5 in memory, 1.95 KiB"
    assert report.forward_seconds > 0
    assert report.adjoint_seconds > 0
    assert report.io_seconds > 0


def test_progress_writes_lines_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("lowtide.chain._progress.SECONDS_BETWEEN_LINES", 0.0)
    grad(step, adjoint_step, X0, 10, adjoint=X0, slots=9, progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == "lowtide: running, 1 of 19 (5 %) forward steps"
    assert lines[-1] == "lowtide: done, 19 of 19 (100 %) forward steps"
    grad(step, adjoint_step, X0, 10, adjoint=X0, slots=9)
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    grad(step, adjoint_step, X0, 10, adjoint=X0, slots=9, progress=True)
    assert "reversing" in sys.stderr.getvalue()


def test_taylor_test_passes_a_correct_gradient_and_fails_a_wrong_one():
    def misfit(x):
        for i in range(10):
            x = step(x, i)
        return float(np.sum(x**2))

    lam, _ = grad(step, adjoint_step, X0, 10, adjoint=lambda x: 2 * x, slots=3)
    correct = taylor_test(misfit, lam, X0)
    assert correct.passed
    assert correct.order == pytest.approx(2, abs=0.1)
    wrong = taylor_test(misfit, 1.001 * lam, X0, steps=(1e-4, 5e-5, 2.5e-5))
    assert not wrong.passed
    assert "failed" in str(wrong)
    assert taylor_test(lambda x: float(x.sum()), np.ones(50), X0).order == float("inf")
    with pytest.raises(ArgumentError, match="they must agree"):
        taylor_test(misfit, lam[:3], X0)


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_taylor_test_with_torch_and_jax(library):
    xp = pytest.importorskip(library)
    x = xp.ones(5)
    result = taylor_test(lambda p: float((p["x"] ** 3).sum()), {"x": 3 * x**2}, {"x": x}, steps=(0.4, 0.2, 0.1))
    assert result.order == pytest.approx(2, abs=0.3)


def test_wave_example(capsys):
    path = Path(__file__).parents[2] / "examples" / "wave_adjoint.py"
    assert len(path.read_text().splitlines()) < 100
    spec = importlib.util.spec_from_file_location("wave_adjoint", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    report, measured_bytes, check = example.main()
    assert report.n == example.STEPS >= 2000
    assert report.budget_bytes == 4 * 2**20
    assert report.peak_bytes <= report.budget_bytes
    assert measured_bytes <= report.budget_bytes, "peak measured by the allocator"
    assert report.forward_steps == report.predicted_forward_steps
    assert all(order == pytest.approx(2, abs=0.05) for order in check.orders)
    assert "order 2.00: passed" in capsys.readouterr().out
