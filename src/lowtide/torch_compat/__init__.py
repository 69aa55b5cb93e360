"""All private torch names that lowtide uses, each behind one small function.

Private names change between releases. `tests/test_torch_compat.py` shows which one is broken.
"""

from .autograd import (
    Backward,
    creates_graph,
    exit_hooks,
    graph_task,
    innermost_hooks,
    next_node_number,
    node_number,
    reinstall_hook,
    running_node,
    running_node_number,
    saved_tensor_hooks_allowed,
    set_grad_enabled,
    wrap_backward,
)
from .compile import never_compile
from .dispatch import (
    below_autograd,
    exit_mode,
    innermost_mode,
    is_tracing_only,
    kernel_of,
    suspend_innermost_mode,
    without_modes,
)
from .modes import EngineMode
from .pytree import tree_leaves
from .schema import is_op, is_pure, returns_only_views, written_arguments
from .settings import is_deterministic, matmul_precision, only_warns_if_not_deterministic
from .storage import (
    is_unshared,
    is_wrapper,
    negated_view,
    new_alias,
    storage_key,
    version_of,
    watched_alias,
    watched_alias_above_kernels,
)

__all__ = [
    "Backward",
    "EngineMode",
    "below_autograd",
    "creates_graph",
    "exit_hooks",
    "exit_mode",
    "graph_task",
    "innermost_hooks",
    "innermost_mode",
    "is_deterministic",
    "is_op",
    "is_pure",
    "is_tracing_only",
    "is_unshared",
    "is_wrapper",
    "kernel_of",
    "matmul_precision",
    "negated_view",
    "never_compile",
    "new_alias",
    "next_node_number",
    "node_number",
    "only_warns_if_not_deterministic",
    "reinstall_hook",
    "returns_only_views",
    "running_node",
    "running_node_number",
    "saved_tensor_hooks_allowed",
    "set_grad_enabled",
    "storage_key",
    "suspend_innermost_mode",
    "tree_leaves",
    "version_of",
    "watched_alias",
    "watched_alias_above_kernels",
    "without_modes",
    "wrap_backward",
    "written_arguments",
]
