"""All variants by name, and what a run takes if nobody says otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from lowtide.planning import BASELINES

from .compiled import Compiled
from .contract import Plain, PlainAgain, Variant
from .others import Dtr, Rotor, Schedule
from .ours import HALF, RULES, SMALLEST, Online, Planned, PlannedWithDisk, Rule
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
AMPLE = "125"  # so much that lowtide leaves steps alone once it knows them: what it costs where it is not needed
DECIDED = (
    CONTROL, "checkpoint", "sac", f"planned@{AMPLE}", f"planned@{HALF}", "planned@checkpoint", "planned@sac",
)  # fmt: skip
"""What the targets compare, and the same code twice: timed more often than the rest."""
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
"""Of every model."""
COMPILE_SHARES = ("0.8", "0.5", "0.2")
_COMPILED = ("compile", *(f"compile@{share}" for share in COMPILE_SHARES))
"""Compiling takes half a minute or more, and once for each setting: two models stand for the others."""
_BESIDE_COMPILED = (
    "plain", CONTROL, "checkpoint", "sac", *_COMPILED, *(f"planned@{way}" for way in _COMPILED),
)  # fmt: skip
COMPILED_MODELS = ("gpt2-compiled", "resnet-compiled")
_SQRT, _ONLINE, _DTR, _ROTOR, _LEAST = (
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
        _LEAST,
        *_DISK,
    ),
    "llama": (_DTR, _LEAST),
    "bert": (_SQRT, _ROTOR),
    "t5": (_ONLINE,),
    "resnet50": (_SQRT, "rule:every1", _ONLINE, _DTR, "planned@60", _LEAST, *_DISK),
    "unet": (_ONLINE, _DTR, _LEAST),
    "diffusion": (_DTR, "planned@60"),
    "mixtral": (_DTR, "planned@60"),
    "mamba": (_ONLINE, _DTR),
    "lstm": (_SQRT, "rule:every1", _ONLINE, _DTR),
    "deep": (_SQRT, _ROTOR, "planned@35", _LEAST),
}
"""Of some models, besides: all would take hours. `checkpoint-sqrt` and rotor need blocks in a row."""


def standard(model: str) -> list[str]:
    """What a run takes of a model if nobody says otherwise."""
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
    "online@RUNG",
    "planned@RUNG",
    "planned-disk@RUNG",
    *(f"schedule:{name}" for name in BASELINES),
    "schedule:rotor@RUNG",
    "schedule:DTR@RUNG",
)
"""What `named` understands. A RUNG is a percentage of plain's peak, "smallest", the name of a variant before it,
whose peak is taken, or "half": half of what plain adds to parameters, buffers and batch."""


class UnknownVariantError(ValueError):
    """There is no variant of this name."""


def named(name: str) -> Variant:
    """A fresh variant."""
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
    raise UnknownVariantError(f"no such variant: {name!r}; there are {', '.join(FORMS)}")


def set_up(names: Iterable[str]) -> dict[str, str]:
    """How each is used, as its own documentation says, in the words of its class; without the settings behind an @."""
    kinds: dict[type[Variant], dict[str, None]] = {}
    for name in dict.fromkeys(names):
        kinds.setdefault(type(named(name)), {})[name.partition("@")[0]] = None
    return {", ".join(kind): inspect.cleandoc(one.__doc__ or "") for one, kind in kinds.items()}


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
