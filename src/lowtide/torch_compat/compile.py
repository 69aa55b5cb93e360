"""torch.compile."""

from __future__ import annotations

from typing import Any

import torch


def never_compile(function: Any) -> None:
    """Keep dynamo from tracing this function, and what it calls, when it runs beneath compiled code.

    What `torch.compiler.disable` does, without a wrapper around every call.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
