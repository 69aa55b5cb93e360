"""Handles: the objects that autograd holds instead of saved tensors."""

from __future__ import annotations

import weakref

from ..._errors import StaleSourceError
from ...torch_compat import below_autograd, new_alias, version_of, watched_alias_above_kernels
from .replay import materialize, stale_error
from .replay_context import BudgetForReplay, ReplayContext
from .retention import Retention
from .saved_tensors import SavedTensors
from .stage_drops import StageDrops
from .value import Origin, Tensor, Value, describe
from .view import Ref


class Kept:
    """A handle on a tensor that stays in memory, with the version check of plain autograd."""

    __slots__ = ("__weakref__", "origin", "save", "saves", "tensor", "version")

    def __init__(self, tensor: Tensor, origin: Origin | None, saves: SavedTensors) -> None:
        # The history of an output holds this handle. Holding the tensor itself would close a reference cycle.
        if tensor.is_leaf:
            self.tensor = tensor
        else:
            self.tensor = new_alias(tensor) if type(tensor) is Tensor else watched_alias_above_kernels(tensor)
        self.version = version_of(tensor)
        self.origin = origin
        self.saves = saves
        self.save = saves.count - 1

    def unpack(self) -> Tensor:
        """Return the saved tensor. Raises `StaleSourceError` if it was modified (hooks disable torch's own check)."""
        self.saves.unpacked.add(self.save)
        if version_of(self.tensor) != self.version:
            made_by = f", made by {self.origin}," if self.origin is not None else ""
            raise StaleSourceError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{describe(self.tensor)}{made_by} is at version {version_of(self.tensor)}; "
                f"version {self.version} was saved for backward. Modify a copy, or modify it after backward."
            )
        return self.tensor


class Handle:
    """A handle on a value that may be recomputed, fetched or decompressed."""

    __slots__ = ("__weakref__", "context", "ref", "save")

    def __init__(self, ref: Ref, context: ReplayContext) -> None:
        """Create the handle of the tensor that autograd has saved last."""
        self.ref = ref
        self.context = context
        self.save = context.saves.count - 1
        self._tell_value()

    def _tell_value(self) -> None:
        """Tell the value of a handle on a part of it."""
        value = self.ref.value
        if self.ref.is_part:
            if value.parts is None:
                value.parts = []
            value.parts.append(weakref.ref(self))

    def move_to(self, value: Value) -> None:
        """Refer to a newer value of the same storage, with the same content in the part that autograd saved."""
        self.ref.value.n_references -= 1
        self.ref.value = value
        value.refer()
        self._tell_value()

    def unpack(self) -> Tensor:
        """Return the tensor that autograd saved."""
        ref, context = self.ref, self.context
        context.saves.unpacked.add(self.save)
        value = ref.value
        with context.lock:
            if context.memory_budget is not None:
                return self._unpack_within(context.memory_budget)
            tensor = value.tensor
            if tensor is None:
                with below_autograd():
                    materialize(value, context)
                    assert value.tensor is not None
                    return ref.over(value.tensor)
            if value.version >= 0 and (why := value.changed()):
                raise stale_error(value, why, "it was saved for backward", context)
            if ref.is_whole(tensor):
                return tensor
            with below_autograd():
                return ref.view(tensor)

    def _unpack_within(self, memory_budget: BudgetForReplay) -> Tensor:
        ref, context = self.ref, self.context
        value = ref.value
        with below_autograd():
            memory_budget.unpack_begins()
            if value.tensor is None:
                materialize(value, context)
            elif value.version >= 0 and (why := value.changed()):
                raise stale_error(value, why, "it was saved for backward", context)
            tensor = value.tensor  # this reference protects it from eviction
            assert tensor is not None
            memory_budget.unpack_ends(value, self.save)
            return ref.over(tensor)


class RetentionHandle(Handle):
    """A handle on a value that its plan releases after use."""

    __slots__ = ("retention",)

    def __init__(self, ref: Ref, context: ReplayContext, retention: Retention) -> None:
        super().__init__(ref, context)
        self.retention = retention
        retention.handle_created(ref.value)

    def move_to(self, value: Value) -> None:
        """Refer to a newer value of the same storage, with the same content in the part that autograd saved."""
        self.retention.handle_freed(self.ref.value)
        super().move_to(value)
        self.retention.handle_created(value)

    def unpack(self) -> Tensor:
        """Return the tensor that autograd saved."""
        with self.context.lock:
            self.retention.handle_unpacked(self.ref.value)
        return super().unpack()

    def __del__(self) -> None:
        self.retention.handle_freed(self.ref.value)


class SwitchingHandle:
    """A handle on a kept value. When its step leaves its plan, it may become one on a value that can be evicted."""

    __slots__ = ("__weakref__", "inner")

    def __init__(self, kept: Kept) -> None:
        self.inner: Handle | Kept = kept

    @property
    def save(self) -> int:
        """The number of the saved tensor."""
        return self.inner.save

    def unpack(self) -> Tensor:
        """Return the tensor that autograd saved."""
        return self.inner.unpack()


class DroppingHandle:
    """A handle after whose unpacks a plan releases values from memory."""

    __slots__ = ("__weakref__", "_drops", "_handle", "_n_unpacks")

    def __init__(self, handle: Handle | Kept | SwitchingHandle, drops: StageDrops) -> None:
        self._handle = handle
        self._drops = drops
        self._n_unpacks = 0

    def unpack(self) -> Tensor:
        """Return the tensor that autograd saved."""
        tensor = self._handle.unpack()
        self._drops.unpacked(self._handle.save, self._n_unpacks)
        self._n_unpacks += 1
        return tensor


AnyHandle = Handle | Kept | SwitchingHandle | DroppingHandle
"""What autograd holds instead of a saved tensor."""
