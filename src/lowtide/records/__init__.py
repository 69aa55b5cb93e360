"""Records that other packages exchange: frozen dataclasses without torch.

    trace.py          what one training step did          validate.py   checks of a trace
    plan.py           what to do with each value          serialize.py  traces as JSON
    link.py           how fast a store is                 codec_cost.py how small and fast a codec is
    scope_report.py   what happened in a scope            budget_report.py  what a memory budget did

The engine makes a `Trace`, planning turns it into a `Plan`, the engine follows the plan.
"""

from .codec_cost import CodecCost
from .link import Link
from .plan import PLAN_VERSION, ModuleSummary, PinnedOp, Plan
from .trace import TRACE_VERSION, CopyEffect, Op, Trace, Unpack, Value, Write

__all__ = [
    "PLAN_VERSION",
    "TRACE_VERSION",
    "CodecCost",
    "CopyEffect",
    "Link",
    "ModuleSummary",
    "Op",
    "PinnedOp",
    "Plan",
    "Trace",
    "Unpack",
    "Value",
    "Write",
]
