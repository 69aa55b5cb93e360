"""What `lowtide doctor` finds out: versions, devices, speeds, and whether the engine works with this torch.

Speeds are single wall-clock times on a machine in use, not benchmarks. Nothing is left behind: the spill file has
no name.
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
    """A package that lowtide uses; `extra` brings an optional one."""

    name: str
    version: str | None
    extra: str | None


@dataclass(frozen=True)
class Device:
    """Something to compute on."""

    name: str
    words: str
    memory_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True)
class Tier:
    """Where values can wait, with its speed in both directions, or why there is none."""

    name: str
    where: str
    out_bytes_per_s: float | None
    in_bytes_per_s: float | None
    trouble: str = ""


@dataclass(frozen=True)
class CodecSpeed:
    """A codec on a value that it is made for."""

    name: str
    exact: bool
    sample: str
    ratio: float | None
    encode_bytes_per_s: float | None
    decode_bytes_per_s: float | None


@dataclass(frozen=True)
class Check:
    """Something that has to work, and what went wrong if it does not."""

    name: str
    works: bool
    words: str


@dataclass(frozen=True)
class Checkup:
    """Everything that was found."""

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
        """Whether everything that has to work does."""
        return all(check.works for check in self.checks)


def check_up(directory: str | None, say: Callable[[str], None]) -> Checkup:
    """Look at everything. `directory` is where the disk is measured; `say` is told what is being done."""
    say("packages and devices")
    found = packages(), devices()
    say("speed of memory and disk")
    speeds = tiers(directory)
    say("speed of codecs")
    codecs = codec_speeds()
    say("does the engine work with this torch?")
    return Checkup(
        lowtide=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        packages=found[0],
        devices=found[1],
        tiers=speeds,
        codecs=codecs,
        checks=(private_names(), exactness("saved values recomputed"), exactness("a budget", budget="1 GiB")),
    )


def packages() -> tuple[Package, ...]:
    """What lowtide's own metadata requires, always or for an extra; the tools of its developers left out."""
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
    """The CPU, and the accelerators that torch sees."""
    words = f"cores: {os.cpu_count()}, threads of torch: {torch.get_num_threads()}"
    found = [Device("cpu", words, total_bytes(), available_bytes())]
    if torch.accelerator.is_available():  # not yet run on an accelerator
        kind = torch.accelerator.current_accelerator()
        home: Any = getattr(torch, kind.type if kind is not None else "cuda", None)
        for index in range(torch.accelerator.device_count()):
            free, total = home.mem_get_info(index) if hasattr(home, "mem_get_info") else (None, None)
            name = home.get_device_name(index) if hasattr(home, "get_device_name") else ""
            found.append(Device(f"{kind}:{index}", name, total, free))
    return tuple(found)


def tiers(directory: str | None) -> tuple[Tier, ...]:
    """How fast values go to host memory and to the disk, and come back; and a plain copy to compare with."""
    source = torch.ones(16 * _ELEMENTS)
    copy = torch.empty_like(source)
    copy.copy_(source)
    start = time.perf_counter()
    copy.copy_(source)
    speed = source.nbytes / max(time.perf_counter() - start, 1e-7)
    del source, copy
    where = directory or tempfile.gettempdir()
    found = [Tier("memory", "a copy", speed, speed)]
    if torch.accelerator.is_available():
        found.append(_tier("host", "host memory", HostStore))
    return (*found, _tier("disk", where, lambda: DiskStore(directory)))


def _tier(name: str, where: str, make: Callable[[], Store]) -> Tier:
    try:
        with make() as store:
            speed: Speed = measure_store(store, "64 MiB")
    except (LowtideError, OSError) as error:
        return Tier(name, where, None, None, str(error))
    return Tier(name, where, speed.out_bytes_per_s, speed.in_bytes_per_s)


def codec_speeds() -> tuple[CodecSpeed, ...]:
    """Each codec on a value of the kind that it is made for."""
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
    """Whether every private name of torch that the engine's code mentions is still there."""
    title = "private names of torch"
    try:
        from .. import torch_compat
    except (ImportError, AttributeError) as error:
        return Check(title, False, f"the engine cannot be imported with torch {torch.__version__}: {error}")
    modules = [vars(torch_compat)[found.name] for found in pkgutil.iter_modules(torch_compat.__path__)]
    names = private_names_in("\n".join(inspect.getsource(module) for module in modules))
    missing = [name for name in names if not _resolves(name)]
    if missing:
        return Check(title, False, f"gone in torch {torch.__version__}: {', '.join(missing)}")
    return Check(title, True, f"all {len(names)} that the engine uses are there")


def private_names_in(source: str) -> list[str]:
    """The dotted names in this code that begin with torch and have a private part: "torch._C._len"."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        name = _dotted(node)
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split(".")):
            found.add(name)
    return sorted(name for name in found if not any(other.startswith(f"{name}.") for other in found))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _resolves(name: str) -> bool:
    at: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(at, part):
            return False
        at = getattr(at, part)
    return True


def exactness(title: str, budget: str | None = None) -> Check:
    """Train a small net plainly and under lowtide: every gradient has to have the same bits."""
    from ..engine.scopes.budget import budget as within
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
        ours = gradients((lambda: within(budget)) if budget is not None else (lambda: saving(KeepNone())))
    except Exception as error:  # whatever a torch that we do not know does
        return Check(title, False, f"{type(error).__name__}: {error}")
    same = len(plain) == len(ours) and all(torch.equal(a, b) for a, b in zip(plain, ours, strict=False))
    return Check(title, same, "gradients are equal to the bit" if same else "gradients differ from plain PyTorch")
