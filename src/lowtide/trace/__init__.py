"""What one training step did, as a record without torch: ops, values, what autograd saved and what backward asked.

The engine and the profiler make a `Trace`; `lowtide.planning` reads it. Imports no torch.
"""

from .records import TRACE_VERSION, Ask, Charge, Copied, Op, Trace, Value, Write

__all__ = ["TRACE_VERSION", "Ask", "Charge", "Copied", "Op", "Trace", "Value", "Write"]
