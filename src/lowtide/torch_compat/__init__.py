"""Every private torch name that lowtide depends on, behind one small function each.

Private names change between releases. `tests/test_torch_compat.py` shows which one broke.
"""

from .autograd import (
    Backward,
    graph_task,
    leave_hooks,
    makes_graph,
    next_node_number,
    node_number,
    put_back_hook,
    running_node,
    running_node_number,
    saving_hooks,
    saving_hooks_allowed,
    set_grad_enabled,
    wrap_backward,
)
from .compile import never_compile
from .dispatch import below_autograd, innermost_mode, kernel_of, leave_mode, only_traced, step_aside, without_modes
from .schema import returns_only_views, written_arguments
from .settings import is_deterministic, matmul_precision, only_warns_if_not_deterministic
from .storage import (
    is_alone,
    is_wrapper,
    new_alias,
    storage_key,
    version_of,
    watched_alias,
    watched_alias_above_kernels,
)

__all__ = [
    "Backward",
    "below_autograd",
    "graph_task",
    "innermost_mode",
    "is_alone",
    "is_deterministic",
    "is_wrapper",
    "kernel_of",
    "leave_hooks",
    "leave_mode",
    "makes_graph",
    "matmul_precision",
    "never_compile",
    "new_alias",
    "next_node_number",
    "node_number",
    "only_traced",
    "only_warns_if_not_deterministic",
    "put_back_hook",
    "returns_only_views",
    "running_node",
    "running_node_number",
    "saving_hooks",
    "saving_hooks_allowed",
    "set_grad_enabled",
    "step_aside",
    "storage_key",
    "version_of",
    "watched_alias",
    "watched_alias_above_kernels",
    "without_modes",
    "wrap_backward",
    "written_arguments",
]
