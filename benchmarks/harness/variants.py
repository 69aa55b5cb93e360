"""All variants by name, and the default variants of each model."""

from __future__ import annotations

from lowtide.planning import BASELINES

from .base import Plain, PlainAgain, Variant
from .baseline_variants import Dtr, Rotor, Schedule
from .compiled import Compiled
from .lowtide_variants import HALF, RULES, SMALLEST, Online, Planned, PlannedWithDisk, Rule
from .peers import EachBlock, SaveOnCpu, Selective, SqrtSegments
from .remat import Remat

CONTROL = "plain-again"
PEERS: dict[str, type[Variant]] = {
    "plain": Plain,
    CONTROL: PlainAgain,
    "checkpoint": EachBlock,
    "checkpoint-sqrt": SqrtSegments,
    "sac": Selective,
    "offload": SaveOnCpu,
    "remat": Remat,
}
AMPLE = "125"  # all values fit: measures the cost of lowtide without memory pressure
MAIN = (
    CONTROL, "checkpoint", "sac", f"planned@{AMPLE}", f"planned@{HALF}", "planned@checkpoint", "planned@sac",
)  # fmt: skip
"""The main comparisons and the control, timed in more rounds than the others."""
STANDARD = (
    "plain",
    CONTROL,
    "checkpoint",
    "sac",
    "remat",
    f"planned@{AMPLE}",
    f"planned@{HALF}",
    "planned@checkpoint",
    "planned@sac",
)
"""Variants of every model."""
COMPILE_SHARES = ("0.8", "0.5", "0.2")
_COMPILED = ("compile", *(f"compile@{share}" for share in COMPILE_SHARES))
"""Only on two models: each setting takes half a minute or more to compile."""
_BESIDE_COMPILED = (
    "plain", CONTROL, "checkpoint", "sac", *_COMPILED, *(f"planned@{way}" for way in _COMPILED),
)  # fmt: skip
COMPILED_MODELS = ("gpt2-compiled", "resnet-compiled")
_SQRT, _ONLINE, _DTR, _ROTOR, _SMALLEST = (
    "checkpoint-sqrt",
    "online@60",
    "schedule:DTR@60",
    "schedule:rotor@checkpoint",
    f"planned@{SMALLEST}",
)
_DISK = (f"planned-disk@{HALF}", "planned-disk@checkpoint")
MORE: dict[str, tuple[str, ...]] = {
    "gpt2": (
        _SQRT,
        "offload",
        *(f"rule:{name}" for name in RULES),
        _ONLINE,
        _DTR,
        _ROTOR,
        "planned@105",
        "planned@60",
        _SMALLEST,
        *_DISK,
    ),
    "llama": (_DTR, _SMALLEST),
    "bert": (_SQRT, _ROTOR),
    "t5": (_ONLINE,),
    "resnet50": (_SQRT, "rule:every1", _ONLINE, _DTR, "planned@60", _SMALLEST, *_DISK),
    "unet": (_ONLINE, _DTR, _SMALLEST),
    "diffusion": (_DTR, "planned@60"),
    "mixtral": (_DTR, "planned@60"),
    "mamba": (_ONLINE, _DTR),
    "lstm": (_SQRT, "rule:every1", _ONLINE, _DTR),
    "deep": (_SQRT, _ROTOR, "planned@35", _SMALLEST),
}
"""More variants of some models; on all models they would take hours. `checkpoint-sqrt` and rotor need consecutive
blocks."""


def standard(model: str) -> list[str]:
    """Return the default variants of a model."""
    if model in COMPILED_MODELS:
        return list(_BESIDE_COMPILED)
    return [*STANDARD, *MORE.get(model, ())]


QUICK = (
    "plain",
    "checkpoint",
    "sac",
    "offload",
    "rule:every1",
    "online@60",
    "planned@60",
    "planned@smallest",
    "planned@checkpoint",
    "planned-disk@60",
)
FORMS = (
    *PEERS,
    "compile",
    "compile@SHARE",
    *(f"rule:{name}" for name in RULES),
    "online@LIMIT",
    "planned@LIMIT",
    "planned-disk@LIMIT",
    *(f"schedule:{name}" for name in BASELINES),
    "schedule:rotor@LIMIT",
    "schedule:DTR@LIMIT",
)
"""Names that `named` accepts."""
LIMITS = """\
SHARE is an activation memory budget from 0 to 1. LIMIT is one of:
  60          a percentage of plain's peak
  half        parameters, buffers and batch, and half of the rest of plain's peak
  smallest    the smallest budget with a plan
  checkpoint  the name of an earlier variant: its peak"""


class UnknownVariantError(ValueError):
    """There is no variant of this name."""


def named(name: str) -> Variant:
    """Return a new variant."""
    if name in PEERS:
        return PEERS[name](name)
    if name == "compile":
        return Compiled(name)
    kind, _, setting = name.partition("@")
    if kind == "compile" and _is_share(setting):
        return Compiled(name, float(setting))
    if kind == "online" and setting:
        return Online(name, setting)
    if kind == "planned" and setting:
        return Planned(name, setting)
    if kind == "planned-disk" and setting:
        return PlannedWithDisk(name, setting)
    if kind == "schedule:rotor" and setting:
        return Rotor(name, setting)
    if kind == "schedule:DTR" and setting:
        return Dtr(name, setting)
    kind, _, setting = name.partition(":")
    if kind == "rule" and setting in RULES:
        return Rule(name, RULES[setting])
    if kind == "schedule" and setting in BASELINES:
        return Schedule(name, setting)
    raise UnknownVariantError(f"no such variant: {name!r}; the variants are {', '.join(FORMS)}")


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
