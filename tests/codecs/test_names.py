"""Codec names resolve to codecs, unknown names are errors, and blosc2 is imported on first use."""

from __future__ import annotations

import doctest
import subprocess
import sys
from types import ModuleType

import pytest

import lowtide
from lowtide.codecs import CODECS, costs, names, resolve
from lowtide.codecs.lossless_bytes import Bytes

EXACT = ["constant", "mask", "narrow", "sparse", "bytes"]
LOSSY = ["bf16", "fp16", "fp8", "int8"]


def resolved(codecs: object) -> list[str]:
    return [codec.name for codec in resolve(codecs)]  # type: ignore[arg-type]


def test_codec_names() -> None:
    assert list(CODECS) == EXACT + LOSSY
    assert [name for name, codec in CODECS.items() if codec.exact] == EXACT


@pytest.mark.parametrize(
    ("codecs", "expected"),
    [
        ("exact", EXACT),
        ("bf16", [*EXACT, "bf16"]),
        (("int8", "bf16"), [*EXACT, "bf16", "int8"]),
        (["exact", "int8"], [*EXACT, "int8"]),
        ("mask", ["mask"]),
        (("sparse", "mask"), ["mask", "sparse"]),
        (("mask", "fp8"), ["mask", "fp8"]),
        (("mask", "exact"), EXACT),
        ((), []),
        (None, []),
    ],
)
def test_resolve_adds_exact_codecs_unless_some_are_named(codecs: object, expected: list[str]) -> None:
    assert resolved(codecs) == expected


@pytest.mark.parametrize("wrong", ["zip", "Exact", "", ("bf16", "zip"), (8,)])
def test_unknown_names_are_refused_with_the_list_of_codecs(wrong: object) -> None:
    with pytest.raises(lowtide.ArgumentError) as caught:
        resolve(wrong)  # type: ignore[arg-type]
    message = str(caught.value)
    unknown = wrong[-1] if isinstance(wrong, tuple) else wrong
    assert message.startswith(f"unknown codec {unknown!r}: use ")
    for name in ["exact", *EXACT, *LOSSY]:
        assert repr(name) in message


def test_bytes_codec_without_blosc2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a machine without blosc2: finding and importing the package fail."""
    monkeypatch.setitem(sys.modules, "blosc2", None)
    monkeypatch.setattr(Bytes, "available", staticmethod(lambda: False))
    assert resolved("exact") == EXACT[:-1]
    with pytest.raises(lowtide.LowtideError, match=r"pip install \"lowtide\[codecs\]\"") as caught:
        resolve("bytes")
    assert isinstance(caught.value, ImportError)


def test_blosc2_is_imported_on_first_use_and_the_error_has_the_pip_line() -> None:
    code = """
import sys, torch, lowtide.codecs as codecs
names = [codec.name for codec in codecs.resolve("exact")]
assert names[-1] == "bytes", names
codecs.CODECS["mask"].encode(torch.zeros(1000))
assert "blosc2" not in sys.modules
sys.modules["blosc2"] = None  # the import fails now, as if blosc2 were not installed
assert [codec.name for codec in codecs.resolve("exact")] == names[:-1]
try:
    codecs.CODECS["bytes"].encode(torch.zeros(1000))
except ImportError as error:
    assert str(error).endswith('pip install "lowtide[codecs]"'), error
else:
    raise AssertionError("no error without blosc2")
del sys.modules["blosc2"]
assert codecs.CODECS["bytes"].encode(torch.zeros(1000)) is not None
assert "blosc2" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("module", [names, costs], ids=lambda module: module.__name__)
def test_docstring_examples(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed
