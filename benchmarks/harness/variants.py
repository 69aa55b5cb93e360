"""All variants by name, and what a run takes if nobody says otherwise."""

from __future__ import annotations

from lowtide.planning import BASELINES

from .compiled import Compiled
from .contract import Plain, Variant
from .others import Dtr, Rotor, Schedule
from .ours import HALF, RULES, SMALLEST, Online, Planned, PlannedWithDisk, Rule
from .peers import EachBlock, SaveOnCpu, Selective, SqrtSegments
from .remat import Remat

PEERS: dict[str, type[Variant]] = {
    "plain": Plain,
    "checkpoint": EachBlock,
    "checkpoint-sqrt": SqrtSegments,
    "sac": Selective,
    "offload": SaveOnCpu,
    "remat": Remat,
}
LADDER = ("60", HALF, SMALLEST)
AMPLE = "110"  # more than plain takes: what lowtide costs where it is not needed
COMPILE_SHARES = ("0.5",)
COMPILED = ("gpt2", "resnet50")
"""Compiling a model takes a minute or more, and once for each setting: these stand for the others."""
STANDARD = (
    *PEERS,
    "compile",
    *(f"compile@{share}" for share in COMPILE_SHARES),
    *(f"rule:{name}" for name in RULES),
    "online@60",
    "schedule:DTR@60",
    "schedule:rotor@checkpoint",
    f"planned@{AMPLE}",
    *(f"planned@{rung}" for rung in LADDER),
    "planned@checkpoint",
    "planned@sac",
    f"planned-disk@{HALF}",
    "planned-disk@checkpoint",
)
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


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
