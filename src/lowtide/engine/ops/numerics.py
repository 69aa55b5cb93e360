"""Settings of torch that change the results of kernels. A replay runs under the settings of forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ...torch_compat import is_deterministic, matmul_precision, only_warns_if_not_deterministic


class Settings(NamedTuple):
    """The settings of one op."""

    default_dtype: torch.dtype
    threads: int
    deterministic: bool
    deterministic_warn_only: bool
    matmul_precision: str


def current() -> Settings:
    """Return the present settings."""
    return Settings(
        torch.get_default_dtype(),
        torch.get_num_threads(),
        is_deterministic(),
        only_warns_if_not_deterministic(),
        matmul_precision(),
    )


@contextmanager
def restored(settings: Settings, now: Settings) -> Iterator[None]:
    """Run the block under `settings`, then restore `now`."""
    _apply(settings, now)
    try:
        yield
    finally:
        _apply(now, settings)


def _apply(wanted: Settings, now: Settings) -> None:
    if wanted.default_dtype != now.default_dtype:
        torch.set_default_dtype(wanted.default_dtype)
    if wanted.threads != now.threads:
        torch.set_num_threads(wanted.threads)
    if wanted[2:4] != now[2:4]:
        torch.use_deterministic_algorithms(wanted.deterministic, warn_only=wanted.deterministic_warn_only)
    if wanted.matmul_precision != now.matmul_precision:
        torch.set_float32_matmul_precision(wanted.matmul_precision)
