"""The checks of `lowtide doctor`: versions, devices, speeds, and whether the engine works with this torch.

Each speed is a single measurement, not a benchmark. The disk is measured with an unnamed file, so no file remains.
The field names of the records are keys of the JSON output.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import pkgutil
import platform
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from .. import __version__
from .._errors import LowtideError
from ..codecs import CODECS, measure
from ..codecs.lossless_bytes import Bytes
from ..stores import DiskStore, HostStore, Store
from ..stores.speed import Speed, measure_store
from ._memory import available_bytes, total_bytes

_ELEMENTS = 2**20
_REQUIREMENT = re.compile(r"""^([A-Za-z0-9._-]+)[^;]*(?:;.*\bextra\s*==\s*['"]([\w-]+)['"])?""")


@dataclass(frozen=True)
class Package:
    """A required or optional package."""

    name: str
    version: str | None
    """None if the package is not installed."""
    extra: str | None
    """The extra of lowtide that installs an optional package."""


@dataclass(frozen=True)
class Device:
    """A device that torch can use."""

    name: str
    words: str
    """Description."""
    memory_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True)
class Tier:
    """A memory tier and its write and read speed."""

    name: str
    where: str
    out_bytes_per_s: float | None
    in_bytes_per_s: float | None
    trouble: str = ""
    """Error message if the tier cannot be used."""


@dataclass(frozen=True)
class CodecSpeed:
    """Compression ratio and speed of a codec on a suitable sample."""

    name: str
    exact: bool
    sample: str
    ratio: float | None
    encode_bytes_per_s: float | None
    decode_bytes_per_s: float | None


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    works: bool
    words: str
    """Details, or the error message."""


@dataclass(frozen=True)
class Checkup:
    """All results of `lowtide doctor`."""

    lowtide: str
    python: str
    system: str
    packages: tuple[Package, ...]
    devices: tuple[Device, ...]
    tiers: tuple[Tier, ...]
    codecs: tuple[CodecSpeed, ...]
    checks: tuple[Check, ...]

    @property
    def well(self) -> bool:
        """Whether all checks passed."""
        return all(check.works for check in self.checks)


def run_checks(directory: str | None, start_phase: Callable[[str], None]) -> Checkup:
    """Run all checks. The disk is measured in `directory`. `start_phase` is called with the title of each phase."""
    start_phase("listing packages and devices")
    found_packages, found_devices = packages(), devices()
    start_phase("measuring memory and disk")
    found_tiers = tiers(directory)
    start_phase("measuring codecs")
    found_codecs = codec_speeds()
    start_phase("checking the engine")
    return Checkup(
        lowtide=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        packages=found_packages,
        devices=found_devices,
        tiers=found_tiers,
        codecs=found_codecs,
        checks=(private_names(), exactness("recomputation"), exactness("online budget", budget="1 GiB")),
    )


def packages() -> tuple[Package, ...]:
    """Return the packages that lowtide requires, always or for an extra, without the development tools."""
    found = []
    for requirement in metadata.requires("lowtide") or []:
        match = _REQUIREMENT.match(requirement)
        if match is None or match.group(2) == "dev":
            continue
        try:
            version: str | None = metadata.version(match.group(1))
        except metadata.PackageNotFoundError:
            version = None
        found.append(Package(match.group(1), version, match.group(2)))
    return tuple(found)


def devices() -> tuple[Device, ...]:
    """Return the CPU and all accelerators."""
    words = f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    found = [Device("cpu", words, total_bytes(), available_bytes())]
    if torch.accelerator.is_available():  # not yet tested on an accelerator
        accelerator = torch.accelerator.current_accelerator()
        module: Any = getattr(torch, accelerator.type if accelerator is not None else "cuda", None)
        for index in range(torch.accelerator.device_count()):
            free, total = module.mem_get_info(index) if hasattr(module, "mem_get_info") else (None, None)
            name = module.get_device_name(index) if hasattr(module, "get_device_name") else ""
            found.append(Device(f"{accelerator}:{index}", name, total, free))
    return tuple(found)


def tiers(directory: str | None) -> tuple[Tier, ...]:
    """Return the speed of a copy in memory, of the host store if there is an accelerator, and of the disk store."""
    source = torch.ones(16 * _ELEMENTS)
    copy = torch.empty_like(source)
    copy.copy_(source)
    start = time.perf_counter()
    copy.copy_(source)
    speed = source.nbytes / max(time.perf_counter() - start, 1e-7)
    del source, copy
    where = directory or tempfile.gettempdir()
    found = [Tier("memory", "copy in memory", speed, speed)]
    if torch.accelerator.is_available():
        found.append(_measure_tier("host", "host memory", HostStore))
    return (*found, _measure_tier("disk", where, lambda: DiskStore(directory)))


def _measure_tier(name: str, where: str, open_store: Callable[[], Store]) -> Tier:
    try:
        with open_store() as store:
            speed: Speed = measure_store(store, "64 MiB")
    except (LowtideError, OSError) as error:
        return Tier(name, where, None, None, str(error))
    return Tier(name, where, speed.out_bytes_per_s, speed.in_bytes_per_s)


def codec_speeds() -> tuple[CodecSpeed, ...]:
    """Return the speed of each codec on a sample that suits the codec."""
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(_ELEMENTS, generator=generator)
    samples = {
        "constant": ("zeros", torch.zeros(_ELEMENTS)),
        "mask": ("a dropout mask", floats > -1.0),
        "narrow": ("token ids", torch.randint(0, 50_000, (_ELEMENTS,), generator=generator)),
        "sparse": ("ReLU of normal floats", torch.relu(floats)),
        "bytes": ("ReLU of normal floats", torch.relu(floats)),
    }
    found = []
    for name, codec in CODECS.items():
        sample, tensor = samples.get(name, ("normal floats", floats))
        measured = measure(codec, tensor) if name != Bytes.name or Bytes.available() else None
        found.append(
            CodecSpeed(
                name,
                codec.exact,
                sample,
                measured.ratio if measured is not None else None,
                measured.encode_bytes_per_second if measured is not None else None,
                measured.decode_bytes_per_second if measured is not None else None,
            )
        )
    return tuple(found)


def private_names() -> Check:
    """Check that torch still has every private name that lowtide uses."""
    title = "private torch names"
    try:
        from .. import torch_compat
    except (ImportError, AttributeError) as error:
        return Check(title, False, f"the engine cannot be imported with torch {torch.__version__}: {error}")
    modules = [vars(torch_compat)[found.name] for found in pkgutil.iter_modules(torch_compat.__path__)]
    names = private_names_in("\n".join(inspect.getsource(module) for module in modules))
    missing = [name for name in names if not _resolves(name)]
    if missing:
        return Check(title, False, f"missing in torch {torch.__version__}: {', '.join(missing)}")
    return Check(title, True, f"all {len(names)} names found")


def private_names_in(source: str) -> list[str]:
    """Return the dotted names in `source` that start with torch and have a private part, as "torch._C._len"."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        name = _dotted_name(node)
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")):
            found.add(name)
    return sorted(name for name in found if not any(other.startswith(f"{name}.") for other in found))


def _dotted_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        prefix = _dotted_name(node.value)
        return f"{prefix}.{node.attr}" if prefix else ""
    return node.id if isinstance(node, ast.Name) else ""


def _resolves(name: str) -> bool:
    value: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def exactness(title: str, budget: str | None = None) -> Check:
    """Check that a small model has bit-equal gradients with and without lowtide."""
    from ..engine.scopes.budget import budget as budget_scope
    from ..engine.scopes.saving import saving
    from ..policies import KeepNone

    def gradients(scope: Any) -> list[torch.Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = [torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(), torch.nn.GELU()]
            net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))
            with scope():
                loss = net(torch.randn(16, 32)).square().mean()
            loss.backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    try:
        plain = gradients(contextlib.nullcontext)
        ours = gradients((lambda: budget_scope(budget)) if budget is not None else (lambda: saving(KeepNone())))
    except Exception as error:  # an unknown version of torch may raise anything
        return Check(title, False, f"{type(error).__name__}: {error}")
    equal = len(plain) == len(ours) and all(torch.equal(a, b) for a, b in zip(plain, ours, strict=False))
    return Check(title, equal, "gradients are bit-equal" if equal else "gradients differ from plain PyTorch")
