"""Deciding what to keep and what to recompute: `solve(trace, budget_bytes) -> Plan`. Imports no torch.

    problem.py      a trace in the shape that planning reads     simulator.py   the judge of every plan
    formulation.py  linear rows                                  milp.py        the programme on HiGHS
    repetition.py   repeated blocks, ties                        chain.py       the programme with tied blocks
    segments.py     cuts of the op stream                        improve.py     undoes recomputes that fit
    bounds.py       what no plan can beat                        smallest.py    the smallest budget that works
    baselines.py    what people do today                         plan.py        the result
    repair.py       making a plan fit that nearly does           describing.py  in words
    candidate.py    judged decisions                             solve.py       the front door
    backward.py     backward, simulated                          writing.py     offloading in forward, simulated
    link.py         how fast a store is                          packing.py     how small and fast a codec is
    annealing.py    plans changed at random, for the better      moves.py       small changes of a plan
    trials.py       the fast judge, for searches                 rows.py        sparse rows of a programme
    reading.py      reading ahead in backward, simulated

Data flows one way: a `Trace` comes in, a `Plan` goes out, and only the simulator says what it costs.
"""

from ..records.codec_cost import CodecCost
from ..records.link import Link
from ..records.plan import PLAN_VERSION, ModuleSummary, PinnedOp, Plan
from .baselines import BASELINES, knapsack
from .bounds import Bound, lower_bound
from .problem import Problem
from .simulator import PeakAt, Simulation, Simulator, simulate
from .smallest import smallest
from .solve import Effort, solve

__all__ = [
    "BASELINES",
    "PLAN_VERSION",
    "Bound",
    "CodecCost",
    "Effort",
    "Link",
    "ModuleSummary",
    "PeakAt",
    "PinnedOp",
    "Plan",
    "Problem",
    "Simulation",
    "Simulator",
    "knapsack",
    "lower_bound",
    "simulate",
    "smallest",
    "solve",
]
