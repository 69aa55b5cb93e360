"""`lowtide.chain` imports neither torch nor jax, also not while it runs on NumPy arrays."""

import subprocess
import sys

CODE = """
import sys
import lowtide.chain
from lowtide import EveryN, Selective
from lowtide.chain import ActivationStore, Checkpointer, grad, schedules, taylor_test
import numpy as np

x = np.linspace(0.1, 1, 200)
step = lambda x, i: np.sin(x)
back = lambda x, lam, i: np.cos(x) * lam
for precision in ("exact", "float16", "bfloat16", "int8"):
    for tier in ("memory", "disk"):
        with ActivationStore(precision=precision, tier=tier) as store:
            store.put(0, {"x": [x, x > 0.5], "z": x * 1j})
            store.get(0), store.take(0)
for rule in (EveryN(2), Selective()):
    c = Checkpointer(rule)
    c.forward(x, [1.1, 1.2, 1.3], lambda layer, x: layer * x)
    c.backward(x, [1.1, 1.2, 1.3], lambda layer, x: layer * x, lambda layer, x, g: layer * g)
lam, _ = grad(step, back, x, 20, adjoint=lambda x: 2 * x, budget="1 MiB", check_determinism=True)
grad(step, back, x, None, stop=lambda x, i: i == 9, adjoint=x, slots=2)
for schedule in (schedules.sqrt(9), schedules.multistage(9, 1, 1, 1.0, 1.0)):
    grad(step, back, x, 9, adjoint=x, schedule=schedule)
taylor_test(lambda x: float(sum(x**2)), 2 * x, x)
print(sorted(name for name in ("torch", "jax", "jaxlib", "rich") if name in sys.modules))
"""


def test_run_on_numpy_imports_neither_torch_nor_jax():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert ran.stdout == "[]\n", ran.stderr
