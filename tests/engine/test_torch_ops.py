"""Every op and module of torch's own sample databases is exact in every scope.

`LOWTIDE_FUZZ_EXAMPLES=1 pytest tests/engine/test_torch_ops.py` runs all forms with more samples; see `torch_samples`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Iterable

import pytest
import torch

import lowtide

from .budgets import random_eviction
from .forked import run_forked
from .torch_samples import FORMS, MODULES, OPS, Case, fill_free_memory, module_cases, op_cases, same

IS_FULL = "LOWTIDE_FUZZ_EXAMPLES" in os.environ
N_SAMPLES = 6 if IS_FULL else 1
TESTED_FORMS = FORMS if IS_FULL else ("function", "without grad")
N_GROUPS = 12

SCOPES = {
    "KeepNone": lambda: lowtide.saving(lowtide.KeepNone()),
    "verified": lambda: lowtide.saving(lowtide.KeepNone(), verify=True),
    "evicting": lambda: random_eviction(3, 0.5, stores=None, codecs=None),
    "watched": lambda: lowtide.budget(2**50),
}

VALUES_ONLY = (
    "without grad, torch computes no vectors, except under a dispatch mode; the values differ in the last bits"
)
CASTS_TWICE = "autocast switches itself off inside this op; a dispatch mode cannot tell, so matrix products are cast"
INEXACT = {
    ("linalg_cond", "without grad"): VALUES_ONLY,
    ("linalg_eigvalsh", "without grad"): VALUES_ONLY,
    ("linalg_matrix_norm", "without grad"): VALUES_ONLY,
    ("linalg_svdvals", "without grad"): VALUES_ONLY,
    ("norm_nuc", "without grad"): VALUES_ONLY,
    ("pinverse", "autocast"): CASTS_TWICE,
}
"""Ops that are not exact, with the reason. `docs/reference/limits.md` has the same list."""

UNSTABLE = ("linalg_lstsq",)
"""Ops of which plain torch gives other bits from run to run: `gelsy` reads pivots that torch has not initialised."""

NOT_COUNTED = ("plain torch raises", "nondeterministic")


def check(cases: Iterable[Case]) -> dict[str, str]:
    """Return a description of each difference between plain torch and the scopes, by case, and the number of cases."""
    found = {}
    counts = dict.fromkeys(("compared", *NOT_COUNTED), 0)
    for case in cases:
        try:
            fill_free_memory(0)
            plain = case.run(contextlib.nullcontext())
        except Exception:
            counts["plain torch raises"] += 1
            continue
        if is_nondeterministic(case, plain):
            counts["nondeterministic"] += 1
            continue
        counts["compared"] += 1
        for name, scope in SCOPES.items():
            try:
                ours = case.run(scope())
            except Exception as error:
                found[f"{case}, {name}"] = f"{type(error).__name__}: {error}"
            else:
                if not same(plain, ours) and not str(case).startswith(UNSTABLE):
                    found[f"{case}, {name}"] = "differs"
    return {**found, **{name: str(n) for name, n in counts.items()}}


def is_nondeterministic(case: Case, plain: list[torch.Tensor | None]) -> bool:
    """Return whether plain torch gives other bits in other memory."""
    for byte in (255, 1, 63):
        fill_free_memory(byte)
        if not same(plain, case.run(contextlib.nullcontext())):
            return True
    return False


def failures(results: dict[str, dict[str, str]]) -> list[str]:
    """Return the differences of ops and forms that are not listed as inexact."""
    known = {f"{op} ({form}," for op, form in INEXACT}
    return [
        f"{item}: {where}: {what}"
        for item, result in results.items()
        for where, what in result.items()
        if where not in ("compared", *NOT_COUNTED) and not any(where.startswith(start) for start in known)
    ]


def assert_exact(results: dict[str, dict[str, str]]) -> None:
    wrong = failures(results)
    assert not wrong, "\n".join([f"{len(wrong)} differences", *(line[:300] for line in wrong[:30])])
    print({what: total(results, what) for what in ("compared", *NOT_COUNTED)})
    assert total(results, "compared") > 10 * sum(total(results, what) for what in NOT_COUNTED)


def total(results: dict[str, dict[str, str]], what: str) -> int:
    return sum(int(result.get(what, 0)) for result in results.values())


@pytest.fixture(autouse=True)
def ignore_warnings() -> None:
    """Some samples use deprecated arguments."""
    warnings.simplefilter("ignore")


@pytest.mark.parametrize("group", range(N_GROUPS))
def test_ops(group: int) -> None:
    names = list(OPS)[group::N_GROUPS]
    results = run_forked(names, lambda name: check(op_cases(name, N_SAMPLES, TESTED_FORMS)))
    assert_exact(results)


def test_modules() -> None:
    names = list(MODULES)
    results = run_forked(names, lambda name: check(module_cases(name, N_SAMPLES)))
    assert_exact(results)


@pytest.mark.parametrize(("op", "form"), INEXACT)
def test_listed_ops_are_inexact(op: str, form: str) -> None:
    """An op that has become exact must be removed from the list."""
    results = run_forked([op], lambda name: check(op_cases(name, 6, (form,))))
    assert "differs" in results[op].values()


def test_unstable_ops_are_unstable_in_plain_torch() -> None:
    """An op that has become deterministic must be removed from the list."""
    matrix, wanted = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    found = set()
    for byte in range(64):
        fill_free_memory(byte)
        found.add(torch.linalg.lstsq(matrix.mT, wanted[:, :3]).solution.numpy().tobytes())
    assert len(found) > 1


def test_a_crash_is_a_failure_of_one_item() -> None:
    def crash(item: str) -> dict[str, str]:
        if item == "crashes":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "raises":
            raise KeyError(item)
        return {"item": item}

    results = run_forked(["first", "crashes", "raises", "last"], crash)
    assert results["first"] == {"item": "first"}
    assert results["last"] == {"item": "last"}
    assert "status -9" in results["crashes"][""]
    assert "KeyError: 'raises'" in results["raises"][""]
