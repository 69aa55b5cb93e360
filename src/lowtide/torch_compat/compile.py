"""Exclude functions from torch.compile."""

from __future__ import annotations

from typing import Any

import torch


def never_compile(function: Any) -> None:
    """Prevent dynamo from tracing this function and the functions that it calls.

    Has the effect of `torch.compiler.disable`, without a wrapper around every call.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
