"""Facts about each op: its writes, its random draws, and whether it may be replayed.

Facts are derived once per op from its schema, its tags and the lists below, which correct incomplete schemas (Rules 6,
7, 8, 9 and 12).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..._errors import ArgumentError
from ...torch_compat import (
    argument_position,
    is_op,
    is_pure,
    kernel_of,
    returns_only_views,
    without_hooks,
    written_arguments,
)

# Rule 7: these write running statistics (arguments 3 and 4) if argument 5, `training`, is true, and their schemas do
# not declare it. Their results do not depend on the statistics that they overwrite.
_HIDDEN_STATISTICS = {"aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm"}
# The same, with complete schemas.
_DECLARED_STATISTICS = {"aten._native_batch_norm_legit", "aten._batch_norm_with_update"}

# Rule 9: ops that return memory without content.
_BLANK = {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided",
          "aten.empty_permuted", "aten.empty_quantized"}  # fmt: skip

# Views whose schemas do not declare it.
_HIDDEN_VIEWS = {"aten._unsafe_view", "aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.unsafe_chunk"}

# Ops that overwrite every element of their first argument.
_OVERWRITERS = {"aten.fill_", "aten.zero_", "aten.copy_", "aten.bernoulli_", "aten.uniform_", "aten.normal_",
                "aten.random_", "aten.exponential_", "aten.cauchy_", "aten.geometric_",
                "aten.log_normal_"}  # fmt: skip

# Ops whose results have at most two distinct elements.
_BINARY_DRAWS = {"aten.bernoulli_", "aten.bernoulli"}
# Elementwise ops on one tensor. They do not increase the number of distinct elements.
_ELEMENTWISE = {"aten.div_", "aten.mul_", "aten.div", "aten.mul", "aten.clone", "aten._to_copy"}

# Ops that give a tensor another storage, instead of writing to its storage.
_REBINDING = {"aten.set_", "aten.resize_", "aten.resize_as_", "aten._resize_output_", "aten.set_data"}

# Recurrent layers of cuDNN and MIOpen draw dropout from an internal state that is not a torch generator.
_HIDDEN_GENERATORS = {"aten._cudnn_rnn", "aten.miopen_rnn", "aten._cudnn_init_dropout_state"}

# Rule 12. Ops of other namespaces that are not in _PURE are not replayed either, unless the user allows it.
_COLLECTIVES = {
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "_c10d_functional_autograd",
    "symm_mem",
    "fsdp",
}
_PURE = {"aten", "prims", "torchvision", "torchaudio", "mkldnn", "xformers", "flash_attn"}
# A quantised tensor has scales besides its storage.
_QUANTISERS = ("aten.quantize_", "aten._empty_affine_quantized", "aten._make_per_")
# The kernels of these ops call ops that autocast casts.
_AUTOCASTS_INSIDE = {"aten._trilinear", "aten.linalg_pinv"}
# By op: positions of results with bytes that the kernel neither writes nor reads. They differ between calls.
_PADDED_RESULTS = {"aten.mkldnn_rnn_layer": (3,)}  # oneDNN's workspace
_allowed: set[str] = set()  # ops and namespaces that the user has allowed, a setting of the process


class OpFacts:
    """Facts about one op, computed once and read at every call."""

    __slots__ = (
        "autocasts_inside",
        "blank",
        "call",
        "draws_binary",
        "dropout_position",
        "elementwise",
        "func",
        "name",
        "overwrites",
        "padded",
        "pinned",
        "rebinds",
        "regathers",
        "region",
        "seeded",
        "simple",
        "skippable",
        "statistics",
        "views",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        self.func = func  # held, so that no other object gets its id
        self.call = kernel_of(func)
        if not is_op(func):
            self._init_higher_order(func)
            return
        self.name = str(func)
        namespace = self.name.partition(".")[0]
        packet = ".".join(self.name.split(".")[:2])
        if namespace in _COLLECTIVES:
            self.call = without_hooks(self.call)
        self.views = returns_only_views(func) or packet in _HIDDEN_VIEWS
        self.writes = written_arguments(func)
        self.statistics = packet in _HIDDEN_STATISTICS or packet in _DECLARED_STATISTICS
        if packet in _HIDDEN_STATISTICS:
            self.writes = ((3, "running_mean"), (4, "running_var"))
        self.blank = packet in _BLANK
        self.overwrites = packet in _OVERWRITERS or (bool(self.writes) and "out" in str(func._overloadname))
        self.rebinds = packet in _REBINDING
        self.draws_binary = packet in _BINARY_DRAWS
        self.elementwise = packet in _ELEMENTWISE
        self.regathers = namespace == "fsdp"
        self.padded = _PADDED_RESULTS.get(packet, ())
        self.autocasts_inside = packet in _AUTOCASTS_INSIDE
        self.region = False
        self.seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.dropout_position = argument_position(func, "dropout_p") if self.seeded else None
        self.pinned: str | None = _why_not_replayed(namespace, packet)
        if torch.Tag.maybe_aliasing_or_mutating in func.tags:
            self.pinned = "its schema does not declare what it writes"
        elif torch.Tag.nondeterministic_bitwise in func.tags:
            self.pinned = "torch declares it nondeterministic"
        # The common case: neither writes nor draws, and may be replayed.
        self.simple = not (self.writes or self.seeded or self.rebinds or self.pinned or self.autocasts_inside)
        # If its values are kept, they need not be recorded: nothing depends on how they were made.
        self.skippable = not (self.writes or self.rebinds or self.pinned or self.blank or self.regathers)

    def _init_higher_order(self, func: Any) -> None:
        self.name = str(func)
        self.padded = ()
        self.views = self.statistics = self.blank = self.overwrites = self.rebinds = self.regathers = False
        self.draws_binary = self.elementwise = self.autocasts_inside = False
        self.writes = ()
        self.seeded = False
        self.dropout_position = None
        self.region = self.name == "inductor_compiled_code"
        self.pinned = "a higher-order op may draw random numbers or write its inputs"
        self.simple = self.skippable = False

    def writes_now(self, args: tuple[Any, ...]) -> bool:
        """Return whether this call writes. Batch norms write only in training."""
        return bool(self.writes) and not (self.statistics and len(args) > 5 and args[5] is False)

    def draws_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this call may draw random numbers. Attention draws only if it has dropout."""
        if not self.seeded or self.dropout_position is None:
            return self.seeded
        position = self.dropout_position
        return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))


def facts_of_region(func: Any, compiled: Any) -> OpFacts:
    """Return the facts about a region compiled by inductor. It is replayed if none of its ops writes or draws."""
    facts = _regions.get(compiled)
    if facts is None:
        facts = OpFacts(func)
        graph = getattr(getattr(compiled, "original_gm", None), "graph", None)
        nodes = [n for n in graph.nodes if n.op == "call_function"] if graph is not None else []
        if nodes and all(_is_pure_call(n.target) for n in nodes):
            facts.pinned = None
            facts.simple = True
        else:
            facts.pinned = "a compiled region that draws random numbers or writes its inputs"
        _regions[compiled] = facts
    return facts


_regions: weakref.WeakKeyDictionary[Any, OpFacts] = weakref.WeakKeyDictionary()  # cache, by compiled region


def _is_pure_call(target: Any) -> bool:
    if not is_op(target):
        return getattr(target, "__module__", "") in ("_operator", "math")  # shapes and tuple items
    return (
        is_pure(target)
        and torch.Tag.nondeterministic_seeded not in target.tags
        and "inductor" not in str(target)
        and facts_of(target).pinned is None
    )


def _why_not_replayed(namespace: str, packet: str) -> str | None:
    if namespace in _COLLECTIVES:
        return "a collective or communication op is never replayed"
    if packet in _HIDDEN_GENERATORS:
        return "it may draw from a hidden generator"
    if packet.startswith(_QUANTISERS):
        return "a quantised tensor is more than its bytes"
    if namespace in _PURE or packet in _allowed or namespace in _allowed:
        return None
    return (
        "a custom op may have effects outside its results; "
        f"if it has none, call lowtide.allow_replay({packet.replace('.', '::')!r})"
    )


# Cache, by id of the op: the hash of an op is slow. The facts hold the op.
FACTS: dict[int, OpFacts] = {}


def facts_of(func: Any) -> OpFacts:
    """Return the facts about an op."""
    facts = FACTS.get(id(func))
    if facts is None:
        facts = FACTS[id(func)] = OpFacts(func)
    return facts


def allow_replay(op: str) -> None:
    """Declare that a custom op ("mylib::op"), or all ops of a namespace ("mylib"), have no side effects.

    Their values may then be recomputed. By default the values of custom ops are kept, because a replay could repeat a
    side effect (Rule 2). Raises `ArgumentError` if `op` is not a string.
    """
    if not isinstance(op, str):
        raise ArgumentError(f'allow_replay needs a name such as "mylib::op" or "mylib", not {type(op).__name__} {op}')
    _allowed.add(op.replace("::", "."))
    FACTS.clear()
