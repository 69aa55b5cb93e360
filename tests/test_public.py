"""Public names, packages that do not import torch, and sizes in bytes."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

import lowtide
from lowtide._units import format_budget, format_bytes, parse_budget, parse_bytes


def test_every_public_name_exists_and_has_a_docstring() -> None:
    assert len(set(lowtide.__all__)) == len(lowtide.__all__)
    for name in lowtide.__all__:
        value = getattr(lowtide, name)
        if name != "__version__":
            assert value.__doc__, name
    assert set(dir(lowtide)) == set(lowtide.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lowtide.nonsense


def test_type_checking_imports_match_the_public_names() -> None:
    source = Path(lowtide.__file__).read_text()
    block = source[source.index("if TYPE_CHECKING:") : source.index("__version__")]
    listed = set(re.findall(r" as (\w+)", block))
    assert listed == set(lowtide.__all__) - {"__version__"}


def test_no_module_shadows_a_public_name() -> None:
    """Importing the module lowtide.x sets lowtide.x, so a public function must not have the name of a module."""
    code = """
import lowtide, pkgutil, importlib
for module in pkgutil.walk_packages(lowtide.__path__, "lowtide."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print([n for n in lowtide.__all__ if n != "chain" and type(getattr(lowtide, n)).__name__ == "module"])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_version_matches_the_metadata() -> None:
    assert lowtide.__version__ == importlib.metadata.version("lowtide")


@pytest.mark.parametrize(
    "package", ["lowtide", "lowtide.chain", "lowtide.policies", "lowtide.records.scope_report", "lowtide._units"]
)
def test_package_does_not_import_torch(package: str) -> None:
    code = f"import sys, {package}; print([m for m in ('torch', 'jax') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8 GiB", 2**33),
        ("1.5kB", 1500),
        (4096, 4096),
        ("0.1 GB", 10**8),
        ("512b", 512),
        (" 2 MiB ", 2**21),
        ("1 TiB", 2**40),
    ],
)
def test_parse_bytes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("size", ["8", "GiB", "8 gigs", "-1 GB", "", "1e3 MB", "0 B"])
def test_invalid_sizes_are_rejected(size: str) -> None:
    with pytest.raises(lowtide.ArgumentError, match="size"):
        parse_bytes(size)


def test_an_int_below_1_mib_is_no_budget() -> None:
    assert parse_budget(2**20) == 2**20
    assert parse_budget("8 B") == 8
    model = torch.nn.Linear(2, 2)
    calls: list[Callable[[int], object]] = [
        parse_budget,
        lowtide.budget,
        lambda budget: lowtide.fit(model, budget=budget),
        lambda budget: lowtide.plan(model, torch.ones(1, 2), budget),
    ]
    for call in calls:
        with pytest.raises(lowtide.ArgumentError, match=r"a budget of 8 needs a unit.*'8 GiB'"):
            call(8)


@given(st.integers(1, 2**50))
def test_a_printed_budget_is_large_enough(nbytes: int) -> None:
    printed = parse_budget(format_budget(nbytes))
    assert nbytes <= printed <= nbytes + nbytes // 100 + 1


@pytest.mark.parametrize("size", [0.5, 8.0, None, True, 0, -3])
def test_bare_floats_are_refused(size: object) -> None:
    with pytest.raises(lowtide.ArgumentError):
        parse_bytes(size)  # type: ignore[arg-type]


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536 * 1024, 2**33, 2**50)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 MiB", "8.00 GiB", "1024.00 TiB",
    ]  # fmt: skip
