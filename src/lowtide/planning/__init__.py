"""Planning: `solve(trace, budget_bytes) -> Plan`. Does not import torch.

A `Trace` comes in, a `Plan` goes out. Every plan is judged by the simulator.

    solve             runs the searches in a fixed order
    problem           a trace as lists by op, value and unpack
    summary           descriptions of decisions, for plans and errors
    refusal           the error for a budget that no plan meets

    simulator         peak and time of decisions
      backward        backward, unpack by unpack
      offload         offloading in forward
      prefetch        prefetching in backward
    fast_judge        a faster simulator for the searches, without offloading
      forward_results, unpack_results, bit_layout, bits
    candidate         decisions with their simulation

    tied_milp         the MILP with shared decisions for repeated blocks
      milp            the loop that solves, simulates and adds byte rows
      formulation     variables and rows
      byte_rows, held_values, rows, highs, solver_output
    repair            makes a plan fit that exceeds the budget
    improve           keeps more values while a plan fits; simple schemes
    smallest          the smallest budget for which a plan is known
    annealing         simulated annealing
      moves           its random changes

    scaling           traces for sizes that were not profiled
      size_functions  functions of sizes that agree with the profiles
    predict           peak and time of a plan for other sizes

    bounds            the lower bound on time
      stages          the bound with backward cut into stages
      minimum_bytes   live bytes that no plan avoids
    baselines         common checkpointing rules
    segments          cuts of the op list
    repetition        repeated blocks
"""

from ..records.codec_cost import CodecCost
from ..records.link import Link
from ..records.plan import PLAN_VERSION, ModuleSummary, PinnedOp, Plan
from .baselines import BASELINES, knapsack
from .bounds import Bound, lower_bound
from .problem import Problem
from .refusal import plan_or_name_budget
from .simulator import PeakAt, Simulation, Simulator, simulate
from .smallest import smallest
from .solve import Effort, is_feasible, solve

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
    "is_feasible",
    "knapsack",
    "lower_bound",
    "plan_or_name_budget",
    "simulate",
    "smallest",
    "solve",
]
